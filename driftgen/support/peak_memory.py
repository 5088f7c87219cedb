"""Peak memory of this process on a device."""

from __future__ import annotations

import gc
import os
import sys

import torch

from driftgen.errors import InputError
from driftgen.support.free_memory import free_memory

__all__ = ["check_fits", "peak_memory", "reset_peak_memory", "show_memory", "total_memory"]

ALWAYS = 1 / 16  # share of the memory that is not compared with what is free: noise is drawn at every step


def peak_memory(device: torch.device) -> int | None:
    """Return the peak in bytes: allocated on the GPU, or resident in host memory.

    None if nothing tells: Windows has no ``resource``, and psutil may be missing.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:
        return _peak_working_set()
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit


def _peak_working_set() -> int | None:
    """Return the peak in bytes as Windows reports it."""
    try:
        import psutil
    except ImportError:
        return None
    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)
    return None if peak is None else int(peak)


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement on a GPU. The peak of host memory is that of the whole process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def show_memory(size: int) -> str:
    """Return a size in GiB, or in MiB below one GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def total_memory(device: torch.device) -> int | None:
    """Return the memory of the GPU or of the machine in bytes; None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def check_fits(what: str, size: int, device: torch.device, advice: str = "lower the sizes") -> None:
    """Raise, before anything is allocated, if ``size`` bytes exceed the free memory of the device."""
    memory = total_memory(device)
    if memory is None or size <= ALWAYS * memory:
        return
    has = "has"
    if size <= memory:
        free = free_memory(device)
        if free is not None and size > free:
            gc.collect()  # objects that refer to each other may hold memory that nobody uses
            free = free_memory(device)
        if free is None or size <= free:
            return
        has = f"has {show_memory(max(free, 0))} free of"
    owner = "the GPU" if device.type == "cuda" else "the machine"
    raise InputError(
        f"{what} takes {show_memory(size)} of memory at least, {owner} {has} {show_memory(memory)}: {advice}"
    )
