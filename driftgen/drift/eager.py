"""The passes in plain PyTorch, chunk by chunk: for every device, dtype, kernel and normalization."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.drift.arguments import check_pairs
from driftgen.drift.batching import Bucket, Chunk, constant
from driftgen.drift.field import (
    displacement,
    drift_coefficients,
    exact_dtype,
    medoid,
    needs_float64,
    pairwise_distance,
)
from driftgen.drift.interfaces import Combined, DriftPass, LossCall, ScalePass
from driftgen.drift.kernels import farthest, is_coarse
from driftgen.drift.normalization import MASKED, MIN_LOG_SUM
from driftgen.drift.statistics import (
    LossTerms,
    Norms,
    Products,
    Units,
    drift_norms,
    loss_terms,
    mean_distance,
    pair_factor,
    power_of_two,
    scale_units,
)

__all__ = ["EagerEngine"]

# Size of a chunk in float32 elements if the caller sets no bound: 256 MiB, or 2 GiB on a GPU, where launches
# are expensive.
CHUNK_ELEMENTS = {"cpu": 2**26, "cuda": 2**29}


@dataclass(frozen=True, eq=False)
class _Work:
    """One chunk of one bucket. Compared by identity, so it can be a dict key."""

    bucket: int  # position of the bucket
    chunk: Chunk
    feature: Tensor  # position of each vector's feature
    buffer: bool  # buffer intermediate results between passes


class _Distances(NamedTuple):
    """y ``[g, v, T, D]``, and the distances from its first N samples to all of it, ``[g, v, N, T]``."""

    samples: Tensor
    distance: Tensor


class _Drifts(NamedTuple):
    """V_τ in units of S: ``values``, ``[g, v, R, N, D]``, times exp(``log_factor``), ``[g, v, R]``."""

    values: Tensor
    log_factor: Tensor | None


class _ScaleBuffers(NamedTuple):
    units: Units
    least: torch.dtype  # of drifts
    distances: dict[_Work, _Distances]


class _DriftBuffers(NamedTuple):
    norms: Norms
    drifts: dict[_Work, _Drifts]


@dataclass(frozen=True)
class _BucketGradient:
    """Gradient of one bucket, dL/dφ = ``drift · factor``.

    ``drift``, ``[G, N, vectors, D]``, is of order 1 and has the dtype of the features. ``factor``,
    ``[vectors]``, holds powers of two. 16-bit gradients are therefore rounded once, and they do not underflow
    before a loss scaler can raise them.
    """

    drift: Tensor
    factor: Tensor
    features: list[tuple[int, torch.dtype]]  # vectors and dtype of each

    def compute(self, upstream: Tensor) -> list[Tensor]:
        """Return the gradient of each feature times ``upstream``, a scalar or ``[G]``."""
        gradient = self.drift * (upstream.reshape(-1, 1) * self.factor)[:, None, :, None]
        parts = gradient.to(self.drift.dtype).split([vectors for vectors, _ in self.features], dim=2)
        return [part.to(dtype) for part, (_, dtype) in zip(parts, self.features, strict=True)]


@dataclass(frozen=True)
class _EagerGradient:
    buckets: list[_BucketGradient]

    def compute(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        return [gradient for bucket in self.buckets for gradient in bucket.compute(upstream)]


class EagerEngine:
    """Keeps intermediate results between passes while they fit the memory bound of ``DriftingLoss.chunk``,
    and recomputes the others in each pass.
    """

    def __init__(self, call: LossCall) -> None:
        self.call, self.settings = call, call.settings
        first = call.buckets[0]
        self.device, self.exact = first.device, exact_dtype(first.device)
        self.groups, self.n = first.generated[0].shape[:2]
        self.t, self.negatives = first.total_samples, first.total_samples - first.positives[0].shape[1]
        shapes = {f: (v, b.width) for b in call.buckets for f, v in zip(b.features, b.vectors, strict=True)}
        table = constant(tuple(shapes[f] for f in range(len(shapes))), self.exact, self.device)
        self.vectors, self.widths = table.unbind(1)
        self.work = list(self._cut())

    def measure_scale(self) -> ScalePass:
        """Measure E_x E_y ‖φ(x) − φ(y)‖ of each feature, weighted over y."""
        weight, distances = self.call.weight, {}
        sums = self.vectors.new_zeros(len(self.vectors), 3)
        distance_sums, pair_sums, groups = sums.unbind(1)
        for work in self.work:
            current = self._distances(work)
            per_sample = current.distance.sum(-2).to(self.exact)
            if weight is not None:
                per_sample *= weight[work.chunk.g0 : work.chunk.g1, None]
            distance_sums.index_add_(0, work.feature, per_sample.sum(-1).sum(0))
            if work.buffer:
                distances[work] = current
            del current
        pairs = self.groups * self.t if weight is None else weight.to(self.exact).sum()
        pair_sums.copy_(self.n * self.vectors * pairs)
        groups.fill_(self.groups)
        self.call.all_reduce(sums)
        scale, given = mean_distance(sums), self.call.statistics
        units = scale_units(self.settings, scale, self.widths, given)
        all_groups = groups[0] if given is None else given.groups
        buffers = _ScaleBuffers(units, self._drift_dtype(scale, units), distances)
        return ScalePass(scale.float(), all_groups, buffers)

    def _drift_dtype(self, scale: Tensor, units: Units) -> torch.dtype:
        """Return float64 if drifts, or their squares, would leave the range of float32 or if the bound of
        distances hides from ``needs_float64`` how close samples are, else float32.
        """
        if self.device.type != "cpu":
            return torch.float32
        spread = scale / units.distance
        ordinary = (spread > 1e-10) & (spread < 1e10) & (scale >= 100 * self.settings.guards.min_distance)
        return torch.float32 if ordinary.all() else self.exact

    def measure_drift(self, scale: ScalePass) -> DriftPass:
        """Measure E[⟨V_τ, V_τ'⟩ / D] of each feature and pair of temperatures."""
        buffers: _ScaleBuffers = scale.buffers
        drifts: dict[_Work, _Drifts] = {}
        r = len(self.settings.temperatures)
        total = Products(self.vectors.new_zeros(len(self.vectors), r, r))
        for work in self.work:
            current = self._drifts(work, buffers)
            product = _products(self._squarable(current.values)).to(self.exact)
            if current.log_factor is not None:
                log_factor = current.log_factor.to(self.exact)
                total = _in_larger_units(total, work.feature, log_factor)
                assert total.log_unit is not None
                product *= pair_factor(log_factor - total.log_unit[work.feature])
            total.sums.index_add_(0, work.feature, product.sum(0))
            if work.buffer:
                drifts[work] = current
            del current
        total = self._over_processes(total)
        count = scale.groups * self.n * self.vectors * self.widths
        norms = drift_norms(self.settings, total, count, self.call.statistics)
        return DriftPass(norms.drift.float(), _DriftBuffers(norms, drifts))

    def _over_processes(self, products: Products) -> Products:
        """Add up the products of all processes, each in its own units. Second collective."""
        sums, log_unit = products
        if log_unit is None:
            self.call.all_reduce(sums)
            return products
        gathered = self.call.gather(torch.cat([sums, log_unit[..., None]], dim=-1))
        parts = Products(gathered[..., :-1], gathered[..., -1])
        log_unit = gathered[..., -1].amax(0)
        return Products(parts.shifted(log_unit).sum(0), log_unit)

    def combine(self, scale: ScalePass, drift: DriftPass) -> Combined:
        """Compute Ṽ = Σ_τ V_τ / λ_τ: the loss, ‖Ṽ‖² of each group, and the gradient."""
        buffers: _DriftBuffers = drift.buffers
        units: Units = scale.buffers.units
        terms = loss_terms(
            self.settings, buffers.norms, units.coordinate, self.n, self.vectors, self.widths, scale.groups
        )
        per_group = self.vectors.new_zeros(self.groups)
        gradients = []
        if self.call.needs_gradient:
            gradients = [self._empty_gradient(bucket, terms) for bucket in self.call.buckets]
        for work in self.work:
            size = terms.drift_size[work.feature]
            combined = self._combined(work, size, scale.buffers, buffers)
            c = work.chunk
            squares = combined.square().sum((-2, -1)).to(self.exact)
            per_group[c.g0 : c.g1] += squares @ (terms.share[work.feature] * size.square())
            if gradients:
                target, mantissa = gradients[work.bucket]
                combined *= mantissa[c.v0 : c.v1, None, None]
                target.drift[c.g0 : c.g1, :, c.v0 : c.v1] = combined.transpose(1, 2)
        gradient = _EagerGradient([target for target, _ in gradients]) if gradients else None
        return Combined(terms.loss.float(), per_group, gradient)

    def _cut(self) -> Iterator[_Work]:
        buffered_share = 0.0
        for position, bucket in enumerate(self.call.buckets):
            peak, lasting = self._elements_per_problem(bucket.width)
            limit = self.settings.chunk or max(1, CHUNK_ELEMENTS.get(self.device.type, 2**26) // peak)
            # Distances, logits, and coefficients of each temperature are held at once.
            problems, pair = self.groups * sum(bucket.vectors), 4 * (len(self.settings.temperatures) + 2)
            check_pairs(min(limit, problems), self.n, self.t, pair, self.device)
            feature = bucket.feature_of_vector(self.device)
            for chunk in bucket.chunks(limit):
                # Results buffered between passes may take as much memory as one chunk at its peak.
                buffered_share += chunk.problems * lasting / (limit * peak)
                yield _Work(position, chunk, feature[chunk.v0 : chunk.v1], buffer=buffered_share <= 1.0)

    def _elements_per_problem(self, width: int) -> tuple[int, int]:
        """float32 elements of one problem: at the peak of a pass, and between passes."""
        n, t, r = self.n, self.t, len(self.settings.temperatures)
        peak = (r + 5) * n * t + (r + 3) * n * width + 5 * t * width
        return peak, max(n * t + t * width, r * n * width)

    def _empty_gradient(self, bucket: Bucket, terms: LossTerms) -> tuple[_BucketGradient, Tensor]:
        """The gradient of a bucket with ``drift`` unwritten, and the factor ``[vectors]`` from Ṽ, in units of
        its size, to that drift.
        """
        dtype = functools.reduce(torch.promote_types, {t.dtype for t in bucket.generated})
        feature = bucket.feature_of_vector(self.device)
        size = terms.drift_size[feature]
        mantissa, exponent = torch.frexp(terms.gradient_factor[feature] * size)
        exponent = exponent.clamp(max=120)  # gradients of denormal features would overflow float32
        drift = torch.empty(bucket.shape, dtype=dtype, device=self.device)
        power = power_of_two(size, exponent)
        features = [(t.shape[2], t.dtype) for t in bucket.generated]
        return _BucketGradient(drift, power.float(), features), mantissa.float()

    def _distances(self, work: _Work, least: torch.dtype = torch.float32) -> _Distances:
        y = self.call.buckets[work.bucket].samples(work.chunk)
        y = y.to(torch.promote_types(y.dtype, least))
        distance = pairwise_distance(y[:, :, : self.n], y)
        if self.settings.guards.min_distance > 0:
            distance.clamp_(min=self.settings.guards.min_distance)
        return _Distances(y, distance)

    def _drifts(self, work: _Work, buffers: _ScaleBuffers) -> _Drifts:
        """V_τ of a chunk. Takes its distances out of the buffers and overwrites them, or recomputes them."""
        s, (units, least, buffered) = self.settings, buffers
        y, distance = buffered.pop(work) if work in buffered else self._distances(work)
        if least != torch.float32 and y.dtype != least:
            y, distance = self._distances(work, least)
        row_sums, unit = distance.sum(-1), units.distance[work.feature, None].float()
        center = medoid(row_sums, y[:, :, : self.n])
        y = y - center
        # On a GPU, reading a value would synchronize.
        if y.dtype == torch.float32 and self.device.type == "cpu":
            mean_logits = s.kernel(row_sums / (unit * self.t), min(s.temperatures))
            factors = s.attraction, s.repulsion
            offset = medoid(row_sums, distance)[:, :, 0, : self.n]  # the row of the medoid
            limit = farthest(min(s.temperatures)) * unit[..., None]
            if needs_float64(distance, offset, self.negatives, mean_logits, factors, limit, own=True):
                y, distance = self._distances(work, torch.float64)
                y = y - center
        elif y.dtype == torch.float32 and s.normalize_features and is_coarse(s.kernel, min(s.temperatures)):
            y, distance = self._distances(work, exact_dtype(self.device))
            y = y - center
        y /= units.coordinate[work.feature, None, None].to(y.dtype)
        x = y[:, :, : self.n]
        distance = distance.div_(units.distance[work.feature, None, None].to(y.dtype))
        reach = farthest(min(s.temperatures), distance.dtype, s.kernel)
        if not s.normalize_features:  # otherwise no ratio of a distance and τ is that large
            # Where the kernel would tell no two distances apart. The loss reports NaN.
            nearest = distance.masked_fill(distance == 0, math.inf).amin((-2, -1), keepdim=True)
            distance.masked_fill_((nearest > reach) & nearest.isfinite(), math.nan)
        distance.clamp_(max=reach)
        masked = math.isinf(s.guards.self_distance)
        if not masked:
            distance.diagonal(dim1=-2, dim2=-1).add_(s.guards.self_distance)
        weight = self.call.weight
        if weight is not None:
            weight = weight[work.chunk.g0 : work.chunk.g1, None, None]
        coefficients = distance.new_empty(*distance.shape[:2], len(s.temperatures), *distance.shape[2:])
        log_factors = []
        for r, temperature in enumerate(s.temperatures):
            logits = s.kernel(distance, temperature)
            if masked:
                logits.diagonal(dim1=-2, dim2=-1).fill_(MASKED)
            coefficients[:, :, r], log_factor = drift_coefficients(
                logits,
                self.negatives,
                s.normalization,
                weight=weight,
                weighted_softmax=s.weighted_softmax,
                floor=s.guards.min_affinity,
                attraction=s.attraction,
                repulsion=s.repulsion,
            )
            if log_factor is not None:
                log_factors.append(log_factor)
        del logits, distance
        coefficients[..., : self.n].diagonal(dim1=-2, dim2=-1).zero_()  # y_i − x_i is 0: only rounding errors
        values = displacement(coefficients, x, y)
        if not log_factors:
            return _Drifts(values, None)
        by_sample = torch.stack(log_factors, dim=2)
        largest = by_sample.amax(dim=-2, keepdim=True)
        values *= by_sample.sub_(largest).exp_()
        return _Drifts(values, largest[..., 0, 0])

    def _combined(self, work: _Work, size: Tensor, scale: _ScaleBuffers, buffers: _DriftBuffers) -> Tensor:
        """Ṽ of a chunk, ``[g, v, N, D]``, in units of its ``size``, ``[v]``. Takes its drifts out of
        ``buffers``, or recomputes them.
        """
        if work in buffers.drifts:
            values, log_factor = buffers.drifts.pop(work)
        else:
            values, log_factor = self._drifts(work, scale)
        factor = buffers.norms.inverse[work.feature] / size[:, None]
        if log_factor is not None:
            log_unit = buffers.norms.log_unit
            assert log_unit is not None
            factor = factor * (log_factor.to(self.exact) - log_unit[work.feature]).exp()
        factor = factor.to(values.dtype)[..., None, None]
        combined = values[:, :, 0] * factor[..., 0, :, :]
        for r in range(1, values.shape[2]):
            combined.addcmul_(values[:, :, r], factor[..., r, :, :])
        return combined

    def _squarable(self, drift: Tensor) -> Tensor:
        # In units of S, drifts are of order 1. In the units of the data, their squares may overflow float32.
        return drift if self.settings.normalize_features else drift.to(self.exact)


def _in_larger_units(products: Products, feature: Tensor, log_factor: Tensor) -> Products:
    """Raise the units of V_τ to the largest factors of the problems, ``[g, v, R]``, of these features."""
    sums, log_unit = products
    if log_unit is None:
        log_unit = torch.full_like(sums[..., 0], MIN_LOG_SUM)
    largest = log_factor.amax(0)
    raised = log_unit.scatter_reduce(0, feature[:, None].expand_as(largest), largest, "amax")
    return Products(Products(sums, log_unit).shifted(raised), raised)


def _products(drifts: Tensor) -> Tensor:
    """⟨V_τ, V_τ'⟩ of each problem, ``[g, v, R, N, D]`` to ``[g, v, R, R]``."""
    if drifts.device.type != "cpu":
        flat = drifts.flatten(3)
        return flat @ flat.mT
    # A batched matmul with so few rows is one slow call per problem on a CPU.
    r = drifts.shape[2]
    products = drifts.new_empty(*drifts.shape[:2], r, r)
    for i in range(r):
        for j in range(i, r):
            product = (drifts[:, :, i] * drifts[:, :, j]).sum((-2, -1))
            products[..., i, j] = products[..., j, i] = product
    return products
