"""All passes of one call as kernels, for one process that measures its own statistics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from driftgen.devices import on
from driftgen.fused.engine import FusedEngine, Shape, block_of
from driftgen.problems import Bucket
from driftgen.settings import Finished, Settings

__all__ = ["FusedPasses"]

BLOCK = 1024  # problems that statistics are taken of at a time


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
        from driftgen.fused.statistics import scale_statistics

        weighted = self.weight is not None
        total = self.exact if self.weight is None else self.weight.sum(dtype=torch.float64)
        for shape, table, sums in self._places(self.engine.scale_pass()):
            pairs = 0 if weighted else shape.groups * sum(shape.samples)
            arguments = sums, table, total, self.engine.numbers, self.exact
            sizes = shape.groups, sum(shape.vectors), shape.samples[0], pairs, shape.width
            least = self.settings.guards.least_scale
            with on(self.engine.device):
                scale_statistics[(len(shape.features),)](
                    *arguments, *sizes, least, weighted, self.engine.temperatures, BLOCK
                )
        return self.engine.numbers[:, 0]

    def measure_drift(self) -> Tensor:
        """Second pass: E[‖V_τ‖² / D] of each feature and temperature."""
        from driftgen.fused.statistics import drift_statistics

        s, r = self.settings, self.engine.temperatures
        self.products = self.engine.products_pass()
        self.losses = torch.empty(self.engine.features, dtype=torch.float64, device=self.engine.device)
        for shape, table, products in self._places(self.products):
            arguments = products, table, self.engine.numbers, self.exact, self.losses
            sizes = shape.groups, sum(shape.vectors), shape.samples[0], shape.width, s.guards.least_drift
            with on(self.engine.device):
                drift_statistics[(len(shape.features),)](
                    *arguments, *sizes, s.normalize_drift, s.sum_vectors, r, BLOCK
                )
        return self.engine.numbers[:, 3 : 3 + r]

    def combine(self) -> tuple[Tensor, Finished]:
        """The loss, its share for each group, and the gradient, if it is wanted."""
        from driftgen.fused.statistics import group_statistics

        found = torch.empty(
            len(self.engine.shapes), self.all_groups, dtype=torch.float64, device=self.engine.device
        )
        for (shape, table, products), per_group in zip(self._places(self.products), found, strict=True):
            vectors, owner = sum(shape.vectors), self.engine.launcher.numbers(shape).owner
            block = min(block_of(vectors), BLOCK)
            with on(self.engine.device):
                group_statistics[(shape.groups,)](
                    products, table, owner, self.exact, per_group, vectors, self.engine.temperatures, block,
                    num_warps=max(1, block // 128),
                )  # fmt: skip
        return self.losses.sum().float(), self.engine.finished(found.sum(0))

    def _places(self, found: list[Tensor]) -> Iterator[tuple[Shape, Tensor, Tensor]]:
        yield from zip(self.engine.shapes, self.engine.tables, found, strict=True)
