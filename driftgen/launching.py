"""GPU kernels that are launched again and again with the same arguments but for the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen.devices import on

__all__ = ["Launch"]

ALIGNED = 16  # bytes: what else Triton compiles another variant for, and what PyTorch's memory always is


class Launch:
    """A kernel for so many programs, with all its arguments but the tensors, which come first.

    With every call Triton looks at all arguments to find what it compiled for them, which takes a host longer
    than a small kernel takes a GPU. Here that is done once, as long as tensors are aligned: they always have
    the same types, and nothing else about them matters.
    """

    def __init__(
        self, kernel: Any, programs: int, device: torch.device, *numbers: float, **options: Any
    ) -> None:
        self.kernel, self.programs, self.device = kernel, programs, device
        self.numbers, self.options = numbers, options
        self._compiled: Any = None
        self._rest: list[Any] = []

    def __call__(self, *tensors: Tensor) -> None:
        """Launches it on the current stream of its device."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        aligned = not any(address % ALIGNED for address in addresses)
        with on(self.device):
            if self._compiled is not None and aligned:
                self._compiled(*addresses, *self._rest)
                return
            compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)
        if aligned and compiled is not None:  # None in Triton's interpreter
            later = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._rest = [*self.numbers, *(self.options[name] for name in later)]
            self._compiled = compiled[(self.programs, 1, 1)]
