"""Where GPU kernels of our own (Triton) are used; PyTorch does the same work everywhere else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "VECTOR",
    "contiguous_rows",
    "has_kernels",
    "is_capturing",
    "is_current",
    "is_plain",
    "linear_and_bias",
    "on",
    "power_of_two",
    "supports",
    "without_kernels",
]

DEVICES = {"cuda"}
TYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR = 8  # numbers of a thread side by side: 16 bytes of a 16-bit type
LEAST_CAPABILITY = (8, 0)  # the first with tensor cores for bfloat16


def has_kernels(device: torch.device) -> bool:
    """Whether kernels of our own run on this device."""
    return device.type in DEVICES and _can_run(device)


@functools.cache
def _can_run(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@contextmanager
def without_kernels() -> Iterator[None]:
    """PyTorch alone, on any device: the reference that kernels are compared with."""
    global DEVICES
    devices = DEVICES
    DEVICES = set()
    try:
        yield
    finally:
        DEVICES = devices


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Where a kernel is launched: entered only if it is another device than the present one, as that takes as
    long as a launch.
    """
    return nullcontext() if is_current(device) else torch.cuda.device(device)


def is_current(device: torch.device) -> bool:
    """Whether kernels are launched there as it is."""
    return device.type != "cuda" or device.index in (None, torch.cuda.current_device())


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def power_of_two(n: int) -> int:
    """The least power of two that is no less: tiles come in no other sizes."""
    return 1 << (n - 1).bit_length()


def supports(x: Tensor) -> bool:
    """Whether kernels of our own run on the device of this tensor, and take its numbers."""
    # The first half is there for the compiler, which compiles again when it changes.
    return x.device.type in DEVICES and x.dtype in TYPES and _ask(x.device)


def _ask(device: torch.device) -> bool:
    return has_kernels(device)


# The compiler is to ask, not to look inside. ``torch.compiler.assume_constant_result`` says so too, but loads
# the whole compiler, and Triton with it, as soon as this module is imported.
_ask._dynamo_marked_constant = True  # type: ignore[attr-defined]


def linear_and_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """W x + b, and b where its gradient is still owed: W x + b was computed with b as a constant.

    The gradient of b is the sum of that of W x + b over all rows, for which PyTorch reads it once more. The
    operator that makes the gradient of W x + b sums it on the way, if it is given b. Layers other than
    ``nn.Linear`` owe nothing, nor does one with hooks, or whose bias is not trained.
    """
    if type(layer) is nn.Linear and is_plain(layer) and layer.bias is not None:
        bias = layer.bias
        if torch.is_grad_enabled() and bias.requires_grad:
            return F.linear(x, layer.weight, bias.detach()), bias
    return layer(x), None


def is_plain(*modules: nn.Module) -> bool:
    """Whether no hooks wait for a call of these modules: what they do may then be done without one."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in modules
    )


def contiguous_rows(modulation: Tensor) -> Tensor:
    """Scale, shift or gate with the numbers of a sample beside each other; samples may lie apart, as parts of
    one layer's output do.
    """
    return modulation if modulation.stride(-1) == 1 else modulation.contiguous()
