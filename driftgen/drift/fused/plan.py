"""All that a call of the kernels needs but for the tensors, put together once for calls alike: a small loss
takes a GPU less time than a host would take to find it again.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftgen.drift.fused.shapes import KERNELS, Numbers, Shape, block_of, numbers_of
from driftgen.drift.interfaces import Settings
from driftgen.drift.normalization import both
from driftgen.ops.launch import Launch

__all__ = ["Part", "Plan", "make_plan"]

MOST_AT_A_TIME = 2048  # problems that statistics are taken of; more would not fit the registers
OF_A_WARP = 128


@dataclass(frozen=True, eq=False)
class Part:
    """One width: its launches, what each pass leaves for those after it, and numbers on the device."""

    shape: Shape
    numbers: Numbers
    left: int  # float32 numbers that the first pass leaves
    kept: int  # and those that the second keeps for the gradient
    scale: Launch
    products: Launch
    scale_statistics: Launch
    drift_statistics: Launch
    group_statistics: Launch
    gradients: tuple[Launch, Launch]  # one upstream number for all groups, or one for each


@dataclass(frozen=True, eq=False)
class Plan:
    """A call of some shapes under some settings, on some device."""

    parts: list[Part]
    features: int
    groups: int
    gradient: bool
    device: torch.device
    exact: torch.dtype
    temperatures: Tensor


@functools.lru_cache(maxsize=256)
def make_plan(
    settings: Settings, shapes: tuple[Shape, ...], weighted: bool, gradient: bool, device: torch.device
) -> Plan:
    """The plan of all calls with these shapes: one width each, narrowest first."""
    exact = torch.float32 if device.type == "mps" else torch.float64
    features = sum(len(shape.features) for shape in shapes)
    parts = [
        _part(settings, shape, weighted, gradient, device, numbers_of(shape, exact, device), features)
        for shape in shapes
    ]
    temperatures = torch.tensor(settings.temperatures).to(device, non_blocking=True)
    return Plan(parts, features, shapes[0].groups, gradient, device, exact, temperatures)


def _part(
    s: Settings,
    shape: Shape,
    weighted: bool,
    gradient: bool,
    device: torch.device,
    numbers: Numbers,
    features: int,
) -> Part:
    from driftgen.drift.fused import passes_triton as kernels
    from driftgen.drift.fused import statistics_triton as statistics

    r = len(s.temperatures)
    sizes = [shape.all_vectors, *shape.samples, shape.width, s.guards.least_distance]
    own = 0.0 if math.isinf(s.guards.self_distance) else s.guards.self_distance
    factors = [own, s.guards.least_affinity, float(s.attraction), float(s.repulsion)]
    constants = {
        "R": r,
        "KERNEL": KERNELS.index(s.kernel),
        "BOTH": s.normalization is both,
        "MASKED": math.isinf(s.guards.self_distance),
        "WEIGHTED": weighted,
        "WEIGH_KERNEL": s.weigh_kernel and weighted,
    }

    def launch(kernel: Any, programs: int, *arguments: float, **options: Any) -> Launch:
        return Launch(kernel, programs, device, *arguments, **options)

    def gradient_launch(by_group: int) -> Launch:
        options = constants | shape.options("gradient_kernel")
        return launch(kernels.gradient_kernel, shape.problems, by_group, *sizes, *factors, **options)

    # Problems of one feature, and of one group, that a program of statistics has at a time.
    of_feature = _at_a_time(shape.groups * max(shape.vectors))
    of_group = _at_a_time(shape.all_vectors)
    counts = shape.groups, shape.all_vectors, shape.samples[0]
    pairs = shape.groups * sum(shape.samples)
    part = Part(
        shape,
        numbers,
        shape.problems * shape.left,
        shape.problems * shape.kept(r) if gradient else 1,
        launch(
            kernels.scale_kernel, shape.problems, *sizes, WEIGHTED=weighted, **shape.options("scale_kernel")
        ),
        launch(
            kernels.products_kernel, shape.problems, *sizes, *factors,
            KEEP=gradient, **(constants | shape.options("products_kernel")),
        ),
        launch(
            statistics.scale_statistics, len(shape.features), *counts, pairs, shape.width,
            s.guards.least_scale, WEIGHTED=weighted, R=r, **of_feature,
        ),
        launch(
            statistics.drift_statistics, len(shape.features), *counts, shape.width, s.guards.least_drift,
            NORMALIZE=s.normalize_drift, SUM_VECTORS=s.sum_vectors, R=r, **of_feature,
        ),
        launch(
            statistics.group_statistics, shape.groups, shape.all_vectors, features, R=r, **of_group,
        ),
        (gradient_launch(0), gradient_launch(1)),
    )  # fmt: skip
    # The three that take longest, side by side: tensors as ``driftgen.drift.fused.engine`` gives them.
    place = shape.dtype, torch.int64, torch.int64, torch.float32
    part.scale.prepare(*place, *[torch.float32] * 2)
    part.products.prepare(*place, *[torch.float32] * 5)
    if gradient:
        part.gradients[0].prepare(*place, *[torch.float32] * 5)
    return part


def _at_a_time(problems: int) -> dict[str, int]:
    block = min(block_of(problems), MOST_AT_A_TIME)
    return {"BLOCK": block, "num_warps": max(1, block // OF_A_WARP)}
