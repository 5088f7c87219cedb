"""Repeated launches of a Triton kernel whose arguments, apart from the tensors, never change."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import device_guard, is_current

__all__ = ["Launch"]

MAX_WORKERS = 8
ALIGNMENT = 16  # bytes: Triton compiles one form for aligned addresses and another for the rest


class Launch:
    """A kernel with its grid size and all arguments except the tensors, which come first.

    Triton inspects all arguments at every call to find the compiled kernel, which takes the host longer than
    a small kernel takes the GPU. This class looks the compiled kernel up by the dtypes of the tensors, if all
    are aligned. None stands for an absent tensor.
    """

    def __init__(
        self, kernel: Any, programs: int, device: torch.device, *numbers: float, **options: Any
    ) -> None:
        self.kernel, self.programs, self.device = kernel, programs, device
        self.numbers, self.options = numbers, options
        self._compiled: dict[tuple[torch.dtype | None, ...], Callable[..., None]] = {}
        self._constants: list[Any] = []
        self._compilation: Future[None] | None = None

    def prepare(self, *dtypes: torch.dtype | None) -> None:
        """Start compiling for tensors of these dtypes in a worker thread.

        Large kernels take seconds to compile, and a first step has many of them.
        """
        from triton.runtime import JITFunction

        if isinstance(self.kernel, JITFunction):  # not in Triton's interpreter
            self._compilation = _workers().submit(self._compile, dtypes)

    def _compile(self, dtypes: tuple[torch.dtype | None, ...]) -> None:
        with device_guard(self.device):
            self.kernel.warmup(*dtypes, *self.numbers, grid=(self.programs,), **self.options)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch the kernel on the current stream of its device."""
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        aligned = not [address for address in addresses if address and address % ALIGNMENT]
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors])
        compiled = self._compiled.get(dtypes) if aligned else None
        if compiled is not None and is_current(self.device):
            compiled(*addresses, *self._constants)
            return
        if self._compilation is not None:
            wait([self._compilation])  # an error of the compiler occurs again below, where it is raised
            self._compilation = None
        with device_guard(self.device):
            if compiled is not None:
                compiled(*addresses, *self._constants)
                return
            kernel = self.kernel[(self.programs,)](*tensors, *self.numbers, **self.options)
        if aligned and kernel is not None:  # None in Triton's interpreter
            constants = self.kernel.arg_names[len(tensors) + len(self.numbers) :]
            self._constants = [*self.numbers, *(self.options[name] for name in constants)]
            self._compiled[dtypes] = kernel[(self.programs, 1, 1)]


@functools.cache
def _workers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1), thread_name_prefix="compile")
