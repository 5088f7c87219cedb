"""The fused engine: a few kernel launches for each width and pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.drift.batching import Bucket
from driftgen.drift.fused.plan import Plan, WidthPlan, make_plan
from driftgen.drift.fused.tables import feature_table
from driftgen.drift.interfaces import Combined, DriftPass, LossCall, ScalePass

__all__ = ["FusedEngine"]


class _ScaleBuffers(NamedTuple):
    """Units ``[F, 2]``; sums over the batch ``[F, 3]`` unless measured by this process alone; and for each
    width the squared norms of all samples.
    """

    units: Tensor
    sums: Tensor | None
    sample_norms: list[Tensor]


class _DriftBuffers(NamedTuple):
    """Norms ``[F, 1 + R]`` and loss terms ``[F, 1 + R²]`` (see ``statistics_triton``); and for each width
    ⟨V_τ, V_τ'⟩ ``[problems, R, R]`` for τ ≤ τ', and softmax terms.
    """

    norms: Tensor
    loss_terms: Tensor
    products: list[Tensor]
    softmax_terms: list[Tensor]


class FusedEngine:
    """The passes as launches of ``passes_triton``, with ``statistics_triton`` between them.

    Problems that do not fit one program are cut into tiles: ``tiled_plan`` then replaces each launch by
    several. Besides inputs and gradients, a call allocates R² + 1 elements for each problem (and for each of
    its tiles), the squared norms of its samples, and, until the gradient is computed, the softmax terms of
    the rows and columns of A. Tiles of wide vectors share a scratch memory of bounded size. The backward pass
    computes the gradient.
    """

    def __init__(self, call: LossCall) -> None:
        self.call, self.plan = call, make_plan(call)
        self.sets = [
            [[_aligned(t) for t in tensors] for tensors in _three_sets(bucket)] for bucket in call.buckets
        ]
        self.tables = [
            feature_table(width.shape, sets, (), self.plan.device)
            for width, sets in zip(self.plan.widths, self.sets, strict=True)
        ]
        # Unweighted kernels take a weight that they do not read.
        self.weight = self.plan.temperatures if call.weight is None else call.weight.contiguous()

    def measure_scale(self) -> ScalePass:
        """Measure E_x E_y ‖φ(x) − φ(y)‖ of each feature, weighted over y."""
        plan, given = self.plan, self.call.statistics
        problem_sums, sample_norms = [], []
        for width, *inputs in self._inputs():
            problem_sums.append(self._empty(width.shape.problems))
            sample_norms.append(self._empty(width.sample_norms))
            width.scale(*inputs, problem_sums[-1], sample_norms[-1])
        scale, units = self._empty(plan.features), self._empty(plan.features, 2, dtype=torch.float64)
        weight_sum = None if self.call.weight is None else self.weight.sum(dtype=torch.float64)
        sums, given_scale = self._sums(3), None
        if given is not None:
            given_scale = given.scale.to(units).expand(plan.features).contiguous()
        for stage, each, table, per_problem in self._stages(sums, problem_sums):
            each.scale_statistics[stage](per_problem, table, weight_sum, sums, given_scale, scale, units)
        groups: Tensor | int = plan.groups
        if sums is not None:
            if given is not None:
                sums[:, 2] = given.groups
            groups = sums[0, 2]
        return ScalePass(scale, groups, _ScaleBuffers(units, sums, sample_norms))

    def measure_drift(self, scale: ScalePass) -> DriftPass:
        """Measure E[⟨V_τ, V_τ'⟩ / D] of each feature and pair of temperatures."""
        plan, given, r = self.plan, self.call.statistics, len(self.plan.temperatures)
        units, scale_sums, sample_norms = scale.buffers
        products, softmax_terms = [], []
        for (width, *inputs), norms in zip(self._inputs(), sample_norms, strict=True):
            products.append(self._empty(width.shape.problems, r, r))
            softmax_terms.append(self._empty(width.softmax_terms))
            width.products(*inputs, units, plan.temperatures, norms, products[-1], softmax_terms[-1])
        drift, norms = self._empty(plan.features, r), self._empty(plan.features, 1 + r)
        loss_terms = self._empty(plan.features, 1 + r * r, dtype=torch.float64)
        sums, given_drift = self._sums(r, r), None
        if given is not None:
            given_drift = given.drift.to(units).expand(plan.features, r).contiguous()
        for stage, each, table, per_problem in self._stages(sums, products):
            each.drift_statistics[stage](
                per_problem, table, units, scale_sums, sums, given_drift, drift, norms, loss_terms
            )
        return DriftPass(drift, _DriftBuffers(norms, loss_terms, products, softmax_terms))

    def combine(self, scale: ScalePass, drift: DriftPass) -> Combined:
        """Sum the loss of each group from the products. The gradient is computed later."""
        plan, several = self.plan, len(self.plan.widths) > 1
        norms, loss_terms, products, softmax_terms = drift.buffers
        loss, per_width = self._empty(), []
        for width, table, per_problem in zip(plan.widths, self.tables, products, strict=True):
            per_width.append(self._empty(plan.groups, dtype=torch.float64 if several else torch.float32))
            width.group_statistics(
                per_problem, table, width.feature_of_vector, loss_terms, per_width[-1], loss
            )
        per_group = torch.stack(per_width).sum(0) if several else per_width[0]
        if not plan.needs_gradient:
            return Combined(loss, per_group)
        samples = [tensor for sets in self.sets for tensors in sets for tensor in tensors]
        gradient = _FusedGradient(plan, self.weight, scale.buffers.units, norms)
        return Combined(loss, per_group, gradient, samples + scale.buffers.sample_norms + softmax_terms)

    def _inputs(self) -> Iterator[tuple[WidthPlan, Tensor, Tensor, Tensor, Tensor]]:
        """Plan of each width, and the tensors that all kernels of the passes read."""
        for width, sets, table in zip(self.plan.widths, self.sets, self.tables, strict=True):
            yield width, sets[0][0], table, width.feature_of_vector, self.weight

    def _stages(
        self, sums: Tensor | None, per_problem: list[Tensor]
    ) -> Iterator[tuple[int, WidthPlan, Tensor, Tensor]]:
        """Yield the statistics of each stage and width, and all-reduce ``sums`` between the two stages."""
        for stage in (0,) if sums is None else (0, 1):
            if stage == 1 and sums is not None:
                self.call.all_reduce(sums)
            for width, table, values in zip(self.plan.widths, self.tables, per_problem, strict=True):
                yield stage, width, table, values

    def _sums(self, *shape: int) -> Tensor | None:
        """Sums between two stages of statistics; None if there is only one."""
        if self.call.statistics is None and not self.call.is_shared:
            return None
        return self._empty(self.plan.features, *shape, dtype=torch.float64)

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.plan.device)


@dataclass(frozen=True)
class _FusedGradient:
    """Computes the gradient in the backward pass, so that it takes no memory before."""

    plan: Plan
    weight: Tensor
    units: Tensor
    norms: Tensor

    def compute(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        widths, remaining, gradients = self.plan.widths, list(saved), []
        upstream = upstream.float()
        by_group = upstream.ndim > 0
        buffers = remaining[-2 * len(widths) :]
        for i, width in enumerate(widths):
            sample_norms, softmax_terms = buffers[i], buffers[len(widths) + i]
            sets = []
            for samples in width.shape.samples:
                count = len(width.shape.features) if samples else 0
                sets.append(remaining[:count])
                del remaining[:count]
            out = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in sets[0]]
            table = feature_table(width.shape, sets, out, self.plan.device)
            width.gradients[by_group](
                sets[0][0], table, width.feature_of_vector, self.weight, self.units, self.norms,
                self.plan.temperatures, sample_norms, softmax_terms, upstream,
            )  # fmt: skip
            gradients += out
        return gradients


def _three_sets(bucket: Bucket) -> list[list[Tensor]]:
    return [bucket.generated, bucket.negatives or [], bucket.positives]


def _aligned(tensor: Tensor) -> Tensor:
    """Return the tensor with contiguous groups and a 16-byte aligned address, copied only if necessary.

    Groups may be strided, as those of positives and negatives that were encoded together are.
    """
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        vectors, width = tensor.shape[2:]
        expected = zip(tensor.shape[1:], tensor.stride()[1:], (vectors * width, width, 1), strict=True)
        dense = all(size == 1 or stride == dense_stride for size, stride, dense_stride in expected)
        if not dense or tensor.stride(0) % width:
            tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
