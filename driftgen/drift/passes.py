"""The three passes of one loss call: scales, drift norms, drift. Between them lie the two collectives."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from driftgen.drift.batching import Bucket
from driftgen.drift.eager import EagerEngine
from driftgen.drift.fused import FusedEngine, FusedPasses, supports_fused
from driftgen.drift.interfaces import Engine, Finished, Settings, Statistics

__all__ = ["AnyPasses", "Passes", "start_passes"]


def start_passes(
    settings: Settings, buckets: list[Bucket], weight: Tensor | None, given: Statistics | None, gradient: bool
) -> AnyPasses:
    """The passes of one call; see :class:`Passes`. GPU kernels do the work where they cover it."""
    fused = supports_fused(settings, buckets)
    if fused and settings.process_group is None and given is None:
        return FusedPasses(settings, buckets, weight, gradient)
    with torch.no_grad():
        engine = (FusedEngine if fused else EagerEngine)(settings, buckets, weight, gradient)
        return Passes(settings, buckets, weight, given, engine)


class Passes:
    """Runs the passes in order: :meth:`measure_scale`, :meth:`measure_drift`, :meth:`combine`.

    ``weight`` is ``[G, T]`` over y = [generated, negatives, positives], or None; ``given`` stands in place of
    what would be measured over the whole batch.
    """

    def __init__(
        self,
        settings: Settings,
        buckets: list[Bucket],
        weight: Tensor | None,
        given: Statistics | None,
        engine: Engine,
    ) -> None:
        self.settings, self.buckets, self.weight, self.given = settings, buckets, weight, given
        first = buckets[0]
        self.device, self.exact = first.device, first.exact
        self.groups, self.n = first.generated[0].shape[:2]
        self.t = first.samples_in_all
        shapes = {f: (v, b.width) for b in buckets for f, v in zip(b.features, b.vectors, strict=True)}
        table = torch.tensor([shapes[f] for f in range(len(shapes))], dtype=self.exact)
        self.vectors, self.widths = table.to(self.device, non_blocking=True).unbind(1)
        self.engine = engine

    @torch.no_grad()
    def measure_scale(self) -> Tensor:
        """First pass and collective: the mean distance of each feature, E_x E_y ‖φ(x) − φ(y)‖, weighted over
        y.
        """
        pairs = self.groups * self.t if self.weight is None else self.weight.to(self.exact).sum()
        sums = self.vectors.new_empty(2 * len(self.vectors) + 1)
        distances, counts, groups = sums.split([len(self.vectors), len(self.vectors), 1])
        distances.copy_(self.engine.sum_distances())
        counts.copy_(self.n * self.vectors * pairs)
        groups.fill_(self.groups)
        self._reduce(sums)
        self.all_groups = groups[0]
        scale: Tensor = distances / counts.clamp(min=torch.finfo(self.exact).tiny)
        used = scale
        if self.given is not None:
            used = self.given.scale.to(scale).expand_as(scale)
            self.all_groups = torch.full_like(self.all_groups, self.given.groups)
        if self.settings.normalize_features:
            self.kernel_unit = _guard(used, self.settings.guards.least_scale)
            self.unit = _guard(used / self.widths.sqrt(), self.settings.guards.least_scale)
        else:
            self.kernel_unit = self.unit = torch.ones_like(scale)
        return scale.float()

    @torch.no_grad()
    def measure_drift(self) -> Tensor:
        """Second pass and collective: E[‖V_τ‖² / D] of each feature and temperature, ``[features, R]``.

        All products ⟨V_τ, V_τ'⟩ are summed, not only the squares: they give the loss of the whole batch
        without a third collective, since ‖Σ_τ V_τ/λ_τ‖² = Σ_ττ' ⟨V_τ, V_τ'⟩ / (λ_τ λ_τ').
        """
        products = self.engine.sum_products(self.kernel_unit, self.unit)
        self._reduce(products)
        count = self.all_groups * self.n * self.vectors * self.widths
        self.products = products / count[:, None, None]
        drift: Tensor = self.products.diagonal(dim1=-2, dim2=-1)
        used = drift
        if self.given is not None:
            used = self.given.drift.to(drift).expand_as(drift)
        if self.settings.normalize_drift:
            squared = _guard(used, self.settings.guards.least_drift, or_else=math.inf)
            self.inverse_norm = squared.rsqrt()
        else:
            self.inverse_norm = torch.ones_like(drift)
        return drift.float()

    def combine(self) -> tuple[Tensor, Finished]:
        """Third pass: Ṽ = Σ_τ V_τ / λ_τ. The loss over all processes, and of this one its share for each
        group and the gradient, if it is wanted.
        """
        features = self.vectors if self.settings.sum_vectors else torch.ones_like(self.vectors)
        per_feature = torch.einsum("frs,fr,fs->f", self.products, self.inverse_norm, self.inverse_norm)
        loss = (per_feature * features).sum()
        share = features / (self.vectors * self.n * self.widths)
        factor = -2 * share / (self.unit * self.all_groups)
        size = torch.ldexp(torch.ones_like(per_feature), torch.frexp(per_feature.sqrt()).exponent)
        return loss.float(), self.engine.finish(self.inverse_norm, share, factor, size)

    def _reduce(self, sums: Tensor) -> None:
        if self.settings.process_group is not None and self.given is None:
            dist.all_reduce(sums, group=self.settings.process_group)


def _guard(value: Tensor, least: float, or_else: float = 1.0) -> Tensor:
    """At least ``least``; without such a bound, ``or_else`` in place of 0, so that 0/0 becomes 0."""
    return value.clamp(min=least) if least > 0 else torch.where(value > 0, value, or_else)


AnyPasses = Passes | FusedPasses
