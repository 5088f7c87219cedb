"""All passes of one call as kernels, for one process that measures its own statistics."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from driftgen.fused.engine import FusedEngine
from driftgen.fused.shapes import Shape, block_of
from driftgen.launching import Launch
from driftgen.problems import Bucket
from driftgen.settings import Finished, Settings

__all__ = ["FusedPasses"]

MOST_AT_A_TIME = 2048  # problems that statistics are taken of; more would not fit the registers
OF_A_WARP = 128


class FusedPasses:
    """What ``driftgen.passes.Passes`` does, for one process that measures its own statistics: kernels between
    the passes, too (``driftgen.fused.statistics``).
    """

    def __init__(
        self, settings: Settings, buckets: list[Bucket], weight: Tensor | None, gradient: bool
    ) -> None:
        self.settings, self.buckets, self.weight = settings, buckets, weight
        self.engine = FusedEngine(settings, buckets, weight, gradient)
        self.all_groups = buckets[0].groups
        features, r = self.engine.features, self.engine.temperatures
        self.exact = torch.empty(features, 1 + r * r, dtype=torch.float64, device=self.engine.device)

    def measure_scale(self) -> Tensor:
        """First pass: the mean distance of each feature."""
        total = self.exact if self.weight is None else self.weight.sum(dtype=torch.float64)
        for shape, table, sums in self._places(self.engine.scale_pass()):
            launch = _scale_statistics(*self.engine.call.key(shape))
            launch(sums, table, total, self.engine.numbers, self.exact)
        return self.engine.numbers[:, 0]

    def measure_drift(self) -> Tensor:
        """Second pass: E[‖V_τ‖² / D] of each feature and temperature."""
        self.products = self.engine.products_pass()
        self.losses = torch.empty(self.engine.features, dtype=torch.float64, device=self.engine.device)
        for shape, table, products in self._places(self.products):
            launch = _drift_statistics(*self.engine.call.key(shape))
            launch(products, table, self.engine.numbers, self.exact, self.losses)
        return self.engine.numbers[:, 3 : 3 + self.engine.temperatures]

    def combine(self) -> tuple[Tensor, Finished]:
        """The loss, its share for each group, and the gradient, if it is wanted."""
        call, several = self.engine.call, len(self.engine.shapes) > 1
        exact = torch.float64 if several else torch.float32
        loss = torch.empty((), device=call.device)
        shares = []
        for shape, table, products in self._places(self.products):
            shares.append(torch.empty(self.all_groups, dtype=exact, device=call.device))
            launch = _group_statistics(*call.key(shape), self.engine.features)
            launch(products, table, call.numbers(shape).owner, self.exact, self.losses, shares[-1], loss)
        return loss, self.engine.finished(torch.stack(shares).sum(0) if several else shares[0])

    def _places(self, found: list[Tensor]) -> Iterator[tuple[Shape, Tensor, Tensor]]:
        yield from zip(self.engine.shapes, self.engine.tables, found, strict=True)


@functools.lru_cache(maxsize=512)
def _scale_statistics(settings: Settings, shape: Shape, weighted: bool, device: torch.device) -> Launch:
    from driftgen.fused.statistics import scale_statistics

    pairs = 0 if weighted else shape.groups * sum(shape.samples)
    numbers = shape.groups, shape.all_vectors, shape.samples[0], pairs, shape.width
    block, r = _at_a_time(shape), len(settings.temperatures)
    return Launch(
        scale_statistics, len(shape.features), device, *numbers, settings.guards.least_scale,
        WEIGHTED=weighted, R=r, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _drift_statistics(settings: Settings, shape: Shape, weighted: bool, device: torch.device) -> Launch:
    from driftgen.fused.statistics import drift_statistics

    numbers = shape.groups, shape.all_vectors, shape.samples[0], shape.width, settings.guards.least_drift
    block, r = _at_a_time(shape), len(settings.temperatures)
    return Launch(
        drift_statistics, len(shape.features), device, *numbers,
        NORMALIZE=settings.normalize_drift, SUM_VECTORS=settings.sum_vectors, R=r, BLOCK=block,
        num_warps=_warps(block),
    )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _group_statistics(
    settings: Settings, shape: Shape, weighted: bool, device: torch.device, features: int
) -> Launch:
    from driftgen.fused.statistics import group_statistics

    block = min(block_of(shape.all_vectors), MOST_AT_A_TIME)
    return Launch(
        group_statistics, shape.groups, device, shape.all_vectors, features,
        R=len(settings.temperatures), BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def _at_a_time(shape: Shape) -> int:
    """Problems of one feature that a program of statistics has at a time."""
    return min(block_of(shape.groups * max(shape.vectors)), MOST_AT_A_TIME)


def _warps(block: int) -> int:
    return max(1, block // OF_A_WARP)
