"""Decide where the Triton kernels of this package run; PyTorch computes the same everywhere else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = [
    "DTYPES",
    "VECTOR",
    "device_guard",
    "has_hooks",
    "has_kernels",
    "is_capturing",
    "is_current",
    "is_tracing",
    "power_of_two",
    "supports",
    "unit_stride",
    "without_kernels",
]

DEVICES = {"cuda"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR = 8  # elements per thread and load: 16 bytes of a 16-bit dtype
MIN_CAPABILITY = (8, 0)  # the first with bfloat16 tensor cores


def has_kernels(device: torch.device) -> bool:
    """Return True if the Triton kernels of this package run on ``device``."""
    return device.type in DEVICES and _can_run(device)


@functools.cache
def _can_run(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


@contextmanager
def without_kernels() -> Iterator[None]:
    """Use plain PyTorch on every device inside this context, as the reference for the kernels."""
    global DEVICES
    devices = DEVICES
    DEVICES = set()
    try:
        yield
    finally:
        DEVICES = devices


def device_guard(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` the current CUDA device inside this context.

    Does nothing if it already is: switching devices takes the host as long as a launch.
    """
    return nullcontext() if is_current(device) else torch.cuda.device(device)


def is_current(device: torch.device) -> bool:
    """Return True if kernels are launched on ``device`` without switching devices."""
    return device.type != "cuda" or device.index in (None, torch.cuda.current_device())


def is_capturing(device: torch.device) -> bool:
    """Return True if the current stream of ``device`` is capturing a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def is_tracing() -> bool:
    """Return True if tensors may be fake, so that their values must be neither read nor cached."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def power_of_two(n: int) -> int:
    """Round n up to a power of two, as the sizes of Triton's tiles must be."""
    return 1 << (n - 1).bit_length()


def supports(x: Tensor) -> bool:
    """Return True if the Triton kernels of this package run on the device of x and take its dtype."""
    # torch.compile guards on the first condition and recompiles when it changes.
    return x.device.type in DEVICES and x.dtype in DTYPES and has_kernels_constant(x.device)


def has_kernels_constant(device: torch.device) -> bool:
    """:func:`has_kernels`, evaluated once while ``torch.compile`` traces a function."""
    return has_kernels(device)


# ``torch.compiler.assume_constant_result`` sets the same flag, but imports the whole compiler, and Triton
# with it, as soon as this module is imported.
has_kernels_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_hooks(*modules: nn.Module) -> bool:
    """Return True if a call of one of these modules runs hooks, so that no kernel may replace the call."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in modules
    )


def unit_stride(x: Tensor) -> Tensor:
    """Return x with stride 1 in its last dimension; a slice of a wider layer's output is not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()
