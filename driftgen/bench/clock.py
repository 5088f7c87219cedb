"""Time and peak memory of a function call, on a GPU or on the CPU."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from driftgen.bench.memory import Meter
from driftgen.errors import InputError
from driftgen.support.distributed import Distributed
from driftgen.support.whole_numbers import check_count

__all__ = ["Timing", "check_repeats", "find_device", "free", "timed"]

# Short calls are repeated for this long: caches are cold at first, and the GPU clock is low.
LEAST_SECONDS = 0.1
MOST_REPEATS = 100_000


@dataclass(frozen=True)
class Timing:
    """Result of :func:`timed`.

    Attributes:
        seconds: median of the repeats, synchronized after each call.
        best: minimum of the repeats.
        first_call_seconds: first call, including compilation.
        peak_bytes: peak memory beyond what was allocated before the first call; None if not known.
        queued_seconds: time per call on a GPU if calls are queued without synchronization, as in training;
            None on the CPU.
    """

    seconds: float
    best: float
    first_call_seconds: float
    peak_bytes: int | None
    queued_seconds: float | None = None


def check_repeats(repeats: int) -> None:
    """Raise unless a number of timed calls is possible."""
    check_count("repeats", repeats, most=MOST_REPEATS)


def timed(
    step: Callable[[], Any],
    device: torch.device,
    repeats: int,
    warmup: int = 1,
    *,
    meter: bool = True,
    cold_peak: bool = False,
    least_seconds: float = LEAST_SECONDS,
) -> Timing:
    """Time ``step``: one cold call, ``warmup`` calls, then ``repeats`` timed calls.

    Timed calls go on until they took ``least_seconds``; processes that wait for each other must pass 0.
    Memory on the CPU is counted operator by operator in one more call. Compiled code hides its operators, so
    pass ``meter=False`` for it. With ``cold_peak`` the peak on a GPU includes the first call, in which a CUDA
    graph allocates its memory.
    """
    check_repeats(repeats)
    if device.type == "cuda":
        return _on_gpu(step, repeats, warmup, cold_peak, least_seconds)
    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    for _ in range(warmup):
        step()
    seconds = _repeated(lambda: _seconds(step), repeats, least_seconds)
    peak = None
    if meter:
        with Meter() as counted:
            step()
        peak = counted.peak
    return Timing(statistics.median(seconds), min(seconds), first, peak)


def _on_gpu(
    step: Callable[[], Any], repeats: int, warmup: int, cold_peak: bool, least_seconds: float
) -> Timing:
    gc.collect()  # garbage that is freed while the calls run would make their peak smaller
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(warmup):
        step()
    torch.cuda.synchronize()
    if not cold_peak:
        torch.cuda.reset_peak_memory_stats()
    seconds = _repeated(lambda: _between_events(step, 1), repeats, least_seconds)
    queued = _between_events(step, len(seconds)) / len(seconds)
    peak = torch.cuda.max_memory_allocated() - held
    return Timing(statistics.median(seconds), min(seconds), first, peak, queued)


def _repeated(measure: Callable[[], float], repeats: int, least_seconds: float) -> list[float]:
    seconds: list[float] = []
    while len(seconds) < repeats or sum(seconds) < least_seconds:
        seconds.append(measure())
    return seconds


def _seconds(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _between_events(step: Callable[[], Any], calls: int) -> float:
    """Return the seconds from an idle GPU to the end of the last call, launches included."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def free(device: torch.device) -> None:
    """Release cached memory, so that the next measurement starts with all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def find_device(name: str | None) -> torch.device:
    """Return the device to measure on; None for the best available."""
    device = Distributed.start(name).device
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device={name} is not supported: give --device cpu or --device cuda")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device
