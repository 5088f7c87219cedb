"""GPU kernels that are launched again and again with the same arguments but for the tensors."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import is_current, on

__all__ = ["Launch"]

MOST_WORKERS = 8
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
        self._prepared: Future[None] | None = None

    def prepare(self, *types: torch.dtype | None) -> None:
        """Begins to compile it for tensors of these types, beside other kernels and other work: the larger
        ones take seconds, of which one after the other a first step has many.
        """
        from triton.runtime import JITFunction

        if isinstance(self.kernel, JITFunction):  # not in Triton's interpreter
            self._prepared = _workers().submit(self._prepare, types)

    def _prepare(self, types: tuple[torch.dtype | None, ...]) -> None:
        with on(self.device):
            self.kernel.warmup(*types, *self.numbers, grid=(self.programs,), **self.options)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launches it on the current stream of its device."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = not [address for address in addresses if address and address % ALIGNED]
        types = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        known = self._compiled.get(types) if aligned else None
        if known is not None and is_current(self.device):
            known(*addresses, *self._rest)
            return
        if self._prepared is not None:
            wait([self._prepared])  # what went wrong goes wrong again below, where it is seen
            self._prepared = None
        with on(self.device):
            if known is not None:
                known(*addresses, *self._rest)
                return
            compiled = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)
        if aligned and compiled is not None:  # None in Triton's interpreter
            constants = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._rest = [*self.numbers, *(self.options[name] for name in constants)]
            self._compiled[types] = compiled[(self.programs, 1, 1)]


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_WORKERS, os.cpu_count() or 1), thread_name_prefix="compile")
