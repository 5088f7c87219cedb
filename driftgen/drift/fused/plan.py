"""Launch plans: everything that a call of the kernels needs except its tensors, cached by shape.

On a GPU, building a plan would take the host longer than a small loss takes the GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from driftgen.drift.fused.shapes import KERNELS, BucketShape, block_size, fits_one_program
from driftgen.drift.fused.strip_plan import TiledGradient
from driftgen.drift.fused.tiled_plan import TiledPasses, TiledProducts, TiledScale, plan_tiles
from driftgen.drift.interfaces import LossCall, Settings
from driftgen.drift.normalization import both
from driftgen.ops.launch import Launch

__all__ = ["Plan", "WidthPlan", "make_plan"]

MAX_STATISTICS_BLOCK = 2048  # problems per iteration of a statistics program; more does not fit the registers
PROBLEMS_PER_WARP = 128

Source = Literal["measured", "shared", "given"]
"""Source of the statistics: this process, all processes of the group, or the caller."""


@dataclass(frozen=True, eq=False)
class WidthPlan:
    """Launches and buffer sizes of one width.

    The statistics launches have one stage if statistics are measured by this process alone, else two; see
    ``statistics_triton``.
    """

    shape: BucketShape
    feature_of_vector: Tensor  # index of each vector's feature within the bucket
    sample_norms: int  # float32 elements that the first pass stores for later passes
    softmax_terms: int  # float32 elements that the second pass stores for the gradient
    scale: Launch | TiledScale
    products: Launch | TiledProducts
    scale_statistics: tuple[Launch, ...]
    drift_statistics: tuple[Launch, ...]
    group_statistics: Launch
    # With a scalar upstream gradient, and with one for each group.
    gradients: tuple[Launch | TiledGradient, Launch | TiledGradient]


@dataclass(frozen=True, eq=False)
class Plan:
    """Launches of a call, one :class:`WidthPlan` for each width, narrowest first."""

    widths: list[WidthPlan]
    features: int
    groups: int
    needs_gradient: bool
    device: torch.device
    temperatures: Tensor


def make_plan(call: LossCall) -> Plan:
    """Return the plan of a call, which all calls of the same shapes share."""
    shapes = tuple([BucketShape.of(bucket) for bucket in call.buckets])
    source: Source = "given" if call.statistics is not None else "shared" if call.is_shared else "measured"
    weighted = call.weight is not None
    return _cached_plan(call.settings, shapes, weighted, call.needs_gradient, source, call.buckets[0].device)


@functools.lru_cache(maxsize=256)
def _cached_plan(
    settings: Settings, shapes: tuple[BucketShape, ...], weighted: bool, needs_gradient: bool, source: Source,
    device: torch.device,
) -> Plan:  # fmt: skip
    features = sum(len(shape.features) for shape in shapes)
    widths = [
        _width_plan(settings, shape, weighted, needs_gradient, source, device, features) for shape in shapes
    ]
    temperatures = torch.tensor(settings.temperatures).to(device, non_blocking=True)
    return Plan(widths, features, shapes[0].groups, needs_gradient, device, temperatures)


def _width_plan(
    s: Settings, shape: BucketShape, weighted: bool, needs_gradient: bool, source: Source,
    device: torch.device, features: int,
) -> WidthPlan:  # fmt: skip
    from driftgen.drift.fused import statistics_triton as statistics

    r = len(s.temperatures)
    masked = math.isinf(s.guards.self_distance)
    sizes: list[float] = [shape.all_vectors, *shape.samples, shape.width, s.guards.min_distance]
    self_distance = 0.0 if masked else s.guards.self_distance
    factors = [self_distance, s.guards.min_affinity, float(s.attraction), float(s.repulsion)]
    constants = {
        "R": r,
        "KERNEL": KERNELS.index(s.kernel),
        "BOTH": s.normalization is both,
        "MASKED": masked,
        "WEIGHTED": weighted,
        "WEIGHTED_SOFTMAX": s.weighted_softmax and weighted,
    }

    def launch(kernel: Any, programs: int, *arguments: float, **options: Any) -> Launch:
        return Launch(kernel, programs, device, *arguments, **options)

    def statistics_launches(kernel: Any, *arguments: float, **options: Any) -> tuple[Launch, ...]:
        stages = [(True, True)] if source == "measured" else [(True, False), (False, True)]
        options |= _block_options(shape.groups * max(shape.vectors))
        return tuple(
            launch(
                kernel, len(shape.features), *counts, *arguments,
                SUM=sums, FINISH=finish, GIVEN=source == "given", **options,
            )
            for sums, finish in stages
        )  # fmt: skip

    counts = shape.groups, shape.all_vectors, shape.samples[0]
    pairs = shape.groups * sum(shape.samples)
    owner = torch.arange(len(shape.vectors)).repeat_interleave(torch.tensor(shape.vectors))
    passes: _WholePasses | TiledPasses
    if fits_one_program(shape):
        passes = _plan_whole(shape, constants, sizes, factors, needs_gradient, device)
    else:
        passes = plan_tiles(shape, constants, s.guards.min_distance, factors, device)
    passes.prepare(shape.dtype, needs_gradient)
    return WidthPlan(
        shape,
        owner.to(device, non_blocking=True),
        passes.sample_norms,
        passes.softmax_terms,
        passes.scale,
        passes.products,
        statistics_launches(
            statistics.scale_statistics, pairs, shape.width, s.guards.min_scale, WEIGHTED=weighted
        ),
        statistics_launches(
            statistics.drift_statistics, shape.width, s.guards.min_drift,
            NORMALIZE=s.normalize_drift, SUM_VECTORS=s.sum_vectors, R=r,
        ),
        launch(
            statistics.group_statistics, shape.groups, shape.all_vectors, features,
            R=r, **_block_options(shape.all_vectors),
        ),
        passes.gradients,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _WholePasses:
    """The passes of one width if one program computes a whole problem."""

    sample_norms: int
    softmax_terms: int
    scale: Launch
    products: Launch
    gradients: tuple[Launch, Launch]

    def prepare(self, dtype: torch.dtype, needs_gradient: bool) -> None:
        """Compile the kernels in parallel, for the dtypes that the engine passes."""
        inputs = dtype, torch.int64, torch.int64, torch.float32
        self.scale.prepare(*inputs, *[torch.float32] * 2)
        self.products.prepare(*inputs, torch.float64, *[torch.float32] * 4)
        if needs_gradient:
            self.gradients[0].prepare(*inputs, torch.float64, *[torch.float32] * 5)


def _plan_whole(
    shape: BucketShape, constants: dict[str, Any], sizes: list[float], factors: list[float],
    needs_gradient: bool, device: torch.device,
) -> _WholePasses:  # fmt: skip
    from driftgen.drift.fused import gradient_triton as last
    from driftgen.drift.fused import passes_triton as kernels

    def launch(kernel: Any, *arguments: float, **options: Any) -> Launch:
        options |= shape.build_options(kernel.__name__)
        return Launch(kernel, shape.problems, device, *arguments, **options)

    gradients = [launch(last.gradient_kernel, by_group, *sizes, *factors, **constants) for by_group in (0, 1)]
    return _WholePasses(
        shape.problems * shape.sample_norms_size,
        shape.problems * shape.softmax_terms_size(constants["R"]) if needs_gradient else 1,
        launch(kernels.scale_kernel, *sizes, WEIGHTED=constants["WEIGHTED"]),
        launch(kernels.products_kernel, *sizes, *factors, STORE_TERMS=needs_gradient, **constants),
        (gradients[0], gradients[1]),
    )


def _block_options(problems: int) -> dict[str, int]:
    block = min(block_size(problems), MAX_STATISTICS_BLOCK)
    return {"BLOCK": block, "num_warps": max(1, block // PROBLEMS_PER_WARP)}
