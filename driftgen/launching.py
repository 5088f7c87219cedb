"""GPU kernels that are launched again and again with the same arguments but for the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from driftgen.devices import is_current, on

__all__ = ["Launch"]

ALIGNED = 16  # bytes: Triton compiles for addresses that are a multiple of it, and for those that are not


class Launch:
    """A kernel for so many programs, with all its arguments but the tensors, which come first.

    With every call Triton looks at all arguments to find what it compiled for them, which takes a host longer
    than a small kernel takes a GPU. Of arguments that never change, once is enough. Of a tensor only its type
    and its alignment matter; None stands for one that is not there.
    """

    def __init__(
        self, kernel: Any, programs: int, device: torch.device, *numbers: float, **options: Any
    ) -> None:
        self.kernel, self.programs, self.device = kernel, programs, device
        self.numbers, self.options = numbers, options
        self._compiled: dict[tuple[torch.dtype | None, ...], Callable[..., None]] = {}
        self._rest: list[Any] = []

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launches it on the current stream of its device."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = not [address for address in addresses if address and address % ALIGNED]
        types = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        known = self._compiled.get(types) if aligned else None
        if known is not None and is_current(self.device):
            known(*addresses, *self._rest)
            return
        with on(self.device):
            if known is not None:
                known(*addresses, *self._rest)
                return
            compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)
        if aligned and compiled is not None:  # None in Triton's interpreter
            constants = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._rest = [*self.numbers, *(self.options[name] for name in constants)]
            self._compiled[types] = compiled[(self.programs, 1, 1)]
