"""Time and network calls per chunk of actions."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from driftgen.policy.rollout import Policy, chunk_sizes
from driftgen.support.provenance import count_threads
from driftgen.support.whole_numbers import check_count

__all__ = ["MOST_BATCH", "MOST_REPEATS", "Latency", "measure_latency"]

LEAST_SECONDS, MOST_SECONDS = 0.2, 10.0
MOST_BATCH, MOST_REPEATS = 2**16, 100_000


@dataclass(frozen=True)
class Latency:
    """Cost of one call of ``predict``.

    Attributes:
        milliseconds: median per call, from observations in host memory to actions in host memory.
        best_milliseconds: minimum.
        network_calls: forward passes of the network; None if the policy does not tell.
        batch: observation histories per call.
        actions_per_second: executed actions over the median, for one environment of the batch.
        repeats: timed calls.
        device: name of the GPU, or ``cpu`` with the number of threads.
    """

    milliseconds: float
    best_milliseconds: float
    network_calls: int | None
    batch: int
    actions_per_second: float
    repeats: int
    device: str

    def record(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)


def measure_latency(
    policy: Policy,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    batch: int = 1,
    repeats: int = 30,
    warmup: int = 3,
) -> Latency:
    """Time ``policy.predict`` on random observations.

    Args:
        policy: anything with ``predict``. The calls of its attribute ``network`` are counted, if that is a
            module; else its attribute ``calls`` is believed.
        shapes: of one observation by key; three dimensions are an image.
        batch: observation histories per call.
        repeats: timed calls, fewer if they take longer than 10 seconds, more if they take less than 0.2.
        warmup: calls before them.
    """
    check_count("batch", batch, most=MOST_BATCH)
    check_count("repeats", repeats, most=MOST_REPEATS)
    _, observed, executed = chunk_sizes(policy)
    random = np.random.default_rng(0)
    observations: dict[str, Any] = {}
    for key, shape in shapes.items():
        size = (batch, observed, *shape)
        image = len(shape) == 3
        observations[key] = (
            random.integers(0, 256, size).astype(np.uint8) if image else random.random(size, np.float32)
        )
    device = _device(policy)
    calls = _count_calls(policy, observations)
    for _ in range(warmup - 1):
        policy.predict(observations, seed=0)
    seconds: list[float] = []
    end = time.perf_counter() + LEAST_SECONDS
    latest = end + MOST_SECONDS
    while not seconds or (
        time.perf_counter() < latest and (len(seconds) < repeats or time.perf_counter() < end)
    ):
        _synchronize(device)
        began = time.perf_counter()
        policy.predict(observations, seed=len(seconds))
        _synchronize(device)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return Latency(
        milliseconds=1e3 * median,
        best_milliseconds=1e3 * min(seconds),
        network_calls=calls,
        batch=batch,
        actions_per_second=executed / median,
        repeats=len(seconds),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {count_threads()}",
    )


def _count_calls(policy: Policy, observations: Mapping[str, Any]) -> int | None:
    """Count the forward passes of the network in one call of ``predict``."""
    network = getattr(policy, "network", None)
    if not isinstance(network, nn.Module):
        policy.predict(observations, seed=0)
        return getattr(policy, "calls", None)
    count = 0

    def add(*_: Any) -> None:
        nonlocal count
        count += 1

    handle = network.register_forward_pre_hook(add)
    try:
        policy.predict(observations, seed=0)
    finally:
        handle.remove()
    return count


def _device(policy: Policy) -> torch.device:
    return torch.device(getattr(policy, "device", "cpu"))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
