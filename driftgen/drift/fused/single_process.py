"""All passes of one call as kernels, for one process that measures its own statistics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from driftgen.drift.batching import Bucket
from driftgen.drift.fused.engine import FusedEngine
from driftgen.drift.fused.plan import Part
from driftgen.drift.interfaces import Finished, Settings

__all__ = ["FusedPasses"]


class FusedPasses:
    """What ``passes.Passes`` does, for one process that measures its own statistics: kernels between
    the passes, too (``driftgen.drift.fused.statistics_triton``).
    """

    def __init__(
        self, settings: Settings, buckets: list[Bucket], weight: Tensor | None, gradient: bool
    ) -> None:
        self.buckets, self.weight = buckets, weight
        self.engine = FusedEngine(settings, buckets, weight, gradient)
        self.plan = plan = self.engine.plan
        self.all_groups = plan.groups
        r = self.engine.temperatures
        self.exact = torch.empty(plan.features, 1 + r * r, dtype=torch.float64, device=plan.device)

    def measure_scale(self) -> Tensor:
        """First pass: the mean distance of each feature."""
        total = self.exact if self.weight is None else self.weight.sum(dtype=torch.float64)
        for part, table, sums in self._places(self.engine.scale_pass()):
            part.scale_statistics(sums, table, total, self.engine.numbers, self.exact)
        return self.engine.numbers[:, 0]

    def measure_drift(self) -> Tensor:
        """Second pass: E[‖V_τ‖² / D] of each feature and temperature."""
        self.products = self.engine.products_pass()
        self.losses = torch.empty(self.plan.features, dtype=torch.float64, device=self.plan.device)
        for part, table, products in self._places(self.products):
            part.drift_statistics(products, table, self.engine.numbers, self.exact, self.losses)
        return self.engine.numbers[:, 3 : 3 + self.engine.temperatures]

    def combine(self) -> tuple[Tensor, Finished]:
        """The loss, its share for each group, and the gradient, if it is wanted."""
        several = len(self.plan.parts) > 1
        exact = torch.float64 if several else torch.float32
        loss = torch.empty((), device=self.plan.device)
        shares = []
        for part, table, products in self._places(self.products):
            shares.append(torch.empty(self.all_groups, dtype=exact, device=self.plan.device))
            owner = part.numbers.owner
            part.group_statistics(products, table, owner, self.exact, self.losses, shares[-1], loss)
        return loss, self.engine.finished(torch.stack(shares).sum(0) if several else shares[0])

    def _places(self, found: list[Tensor]) -> Iterator[tuple[Part, Tensor, Tensor]]:
        yield from zip(self.plan.parts, self.engine.tables, found, strict=True)
