"""Where GPU kernels of our own (Triton) are used; PyTorch does the same work everywhere else."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["has_kernels", "is_current", "is_recorded", "on", "power_of_two", "without_kernels"]

DEVICES = {"cuda"}
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


def is_recorded(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def power_of_two(n: int) -> int:
    """The least power of two that is no less: tiles come in no other sizes."""
    return 1 << (n - 1).bit_length()
