"""The passes in plain PyTorch, chunk by chunk: for every device, type, kernel and normalisation."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from driftgen.drift.batching import Bucket, Chunk
from driftgen.drift.field import displacement, drift_coefficients, medoid, pairwise_distance
from driftgen.drift.interfaces import Finished, Settings
from driftgen.drift.kernels import farthest
from driftgen.drift.normalization import MASKED

__all__ = ["EagerEngine"]

# float32 numbers that one chunk may take when the caller sets no bound: 256 MiB, or 2 GiB where launches are
# dear.
CHUNK_NUMBERS = {"cpu": 2**26, "cuda": 2**29}


@dataclass
class _Drift:
    """The normalised drift of a bucket in a form that gradients can be read from: dL/dφ = ``values ·
    factor``.

    ``values``, ``[G, N, vectors, D]``, are of order 1 and in the type of the features; ``factor``,
    ``[vectors]``, holds powers of two, so that 16-bit gradients are rounded once and do not vanish before a
    loss scaler can lift them.
    """

    values: Tensor
    mantissa: Tensor
    factor: Tensor
    features: list[tuple[int, torch.dtype]]  # vectors and type of each

    def gradients(self, upstream: Tensor) -> list[Tensor]:
        """The gradient to each generated feature, times ``upstream`` of all groups or of each."""
        gradient = self.values * (upstream.reshape(-1, 1) * self.factor)[:, None, :, None]
        parts = gradient.to(self.values.dtype).split([vectors for vectors, _ in self.features], dim=2)
        return [part.to(dtype) for part, (_, dtype) in zip(parts, self.features, strict=True)]


@dataclass
class _Work:
    """One chunk of one bucket, and what is kept of it from pass to pass."""

    bucket: int  # its position
    chunk: Chunk
    feature: Tensor  # position of each vector's feature
    keep: bool
    distance: tuple[Tensor, Tensor] | None = None
    drifts: tuple[Tensor, Tensor | None] | None = None


@dataclass
class _Drifts:
    buckets: list[_Drift]

    def read(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        return [gradient for drift in self.buckets for gradient in drift.gradients(upstream)]


class EagerEngine:
    """Keeps what fits between passes, and computes the rest anew in each; see ``DriftingLoss.chunk``.

    ``weight`` is ``[G, T]`` over y = [generated, negatives, positives], or None; ``gradient`` says whether
    it is wanted.
    """

    def __init__(
        self, settings: Settings, buckets: list[Bucket], weight: Tensor | None, gradient: bool
    ) -> None:
        self.settings, self.buckets, self.weight, self.gradient = settings, buckets, weight, gradient
        first = buckets[0]
        self.device, self.exact = first.device, first.exact
        self.groups, self.n = first.generated[0].shape[:2]
        self.t, self.negatives = first.samples_in_all, first.samples_in_all - first.positives[0].shape[1]
        self.features = sum(len(bucket.features) for bucket in buckets)
        self.work = list(self._cut())

    def _cut(self) -> Iterator[_Work]:
        kept = 0.0
        for position, bucket in enumerate(self.buckets):
            needed, lasting = self._numbers_per_problem(bucket.width)
            limit = self.settings.chunk or max(1, CHUNK_NUMBERS.get(self.device.type, 2**26) // needed)
            feature = bucket.feature_of_vector(self.device)
            for chunk in bucket.chunks(limit):
                # What is kept from pass to pass may take as much again as one chunk in work.
                kept += chunk.problems * lasting / (limit * needed)
                yield _Work(position, chunk, feature[chunk.v0 : chunk.v1], keep=kept <= 1.0)

    def _numbers_per_problem(self, width: int) -> tuple[int, int]:
        """Most float32 numbers that one problem needs in work, and between passes (see
        ``DriftingLoss.chunk``).
        """
        n, t, r = self.n, self.t, len(self.settings.temperatures)
        needed = (r + 5) * n * t + (r + 3) * n * width + 5 * t * width
        return needed, max(n * t + t * width, r * n * width)

    def sum_distances(self) -> Tensor:
        sums = torch.zeros(self.features, dtype=self.exact, device=self.device)
        for work in self.work:
            distance = self._distance(work)[1].sum(-2)
            if self.weight is not None:
                distance *= self.weight[work.chunk.g0 : work.chunk.g1, None]
            sums.index_add_(0, work.feature, distance.sum(-1).to(self.exact).sum(0))
        return sums

    def sum_products(self, kernel_unit: Tensor, unit: Tensor) -> Tensor:
        self.kernel_unit, self.unit = kernel_unit.float(), unit.float()
        r = len(self.settings.temperatures)
        products = torch.zeros(self.features, r, r, dtype=self.exact, device=self.device)
        for work in self.work:
            drifts, log_factor = self._drifts(work)
            product = _products(self._squarable(drifts)).to(self.exact)
            if log_factor is not None:
                log_factor = log_factor.to(self.exact)
                product *= (log_factor[..., :, None] + log_factor[..., None, :]).exp()
            products.index_add_(0, work.feature, product.sum(0))
        return products

    def finish(self, inverse_norm: Tensor, share: Tensor, factor: Tensor, size: Tensor) -> Finished:
        per_group = torch.zeros(self.groups, dtype=self.exact, device=self.device)
        kept = [self._empty_drift(bucket, factor, size) for bucket in self.buckets] if self.gradient else []
        for work in self.work:
            drift = self._combined(work, inverse_norm)
            c = work.chunk
            squares = self._squarable(drift).square().sum((-2, -1)).to(self.exact)
            per_group[c.g0 : c.g1] += squares @ share[work.feature]
            if self.gradient:
                target = kept[work.bucket]
                drift *= target.mantissa[c.v0 : c.v1, None, None]
                target.values[c.g0 : c.g1, :, c.v0 : c.v1] = drift.transpose(1, 2)
        return Finished(per_group, _Drifts(kept) if self.gradient else None)

    def _empty_drift(self, bucket: Bucket, factor: Tensor, size: Tensor) -> _Drift:
        dtype = functools.reduce(torch.promote_types, {t.dtype for t in bucket.generated})
        feature = bucket.feature_of_vector(self.device)
        size = size[feature]
        mantissa, exponent = torch.frexp(factor[feature] * size)
        exponent = exponent.clamp(max=100)  # the gradient to denormal features would leave float32
        values = torch.empty(bucket.shape, dtype=dtype, device=self.device)
        power = torch.ldexp(torch.ones_like(size), exponent)
        features = [(t.shape[2], t.dtype) for t in bucket.generated]
        return _Drift(values, (mantissa / size).float(), power.float(), features)

    def _distance(self, work: _Work) -> tuple[Tensor, Tensor]:
        """y, ``[g, v, T, D]``, and the distances from its first N to all of it, ``[g, v, N, T]``."""
        if work.distance is not None:
            return work.distance
        y = self.buckets[work.bucket].samples(work.chunk)
        distance = pairwise_distance(y[:, :, : self.n], y)
        if self.settings.guards.least_distance > 0:
            distance.clamp_(min=self.settings.guards.least_distance)
        if work.keep:
            work.distance = y, distance
        return y, distance

    def _drifts(self, work: _Work) -> tuple[Tensor, Tensor | None]:
        """V_τ in units of S, ``[g, v, R, N, D]``, and the logarithm of a factor ``[g, v, R]`` kept apart, if
        any.
        """
        s = self.settings
        if work.drifts is not None:
            return work.drifts
        y, distance = self._distance(work)
        work.distance = None
        centre = medoid(distance, y[:, :, : self.n])
        y = (y - centre).float().div_(self.unit[work.feature, None, None])
        x = y[:, :, : self.n]
        distance = distance.div_(self.kernel_unit[work.feature, None, None])
        distance.clamp_(max=farthest(min(s.temperatures)))
        masked = math.isinf(s.guards.self_distance)
        if not masked:
            distance.diagonal(dim1=-2, dim2=-1).add_(s.guards.self_distance)
        weight = None if self.weight is None else self.weight[work.chunk.g0 : work.chunk.g1, None, None]
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
                weigh_kernel=s.weigh_kernel,
                floor=s.guards.least_affinity,
                attraction=s.attraction,
                repulsion=s.repulsion,
            )
            if log_factor is not None:
                log_factors.append(2 * log_factor[..., 0, 0])
        del logits, distance
        drifts = displacement(coefficients, x, y)
        result = drifts, torch.stack(log_factors, dim=-1) if log_factors else None
        if work.keep:
            work.drifts = result
        return result

    def _combined(self, work: _Work, inverse_norm: Tensor) -> Tensor:
        drifts, log_factor = self._drifts(work)
        work.drifts = None
        factor = inverse_norm[work.feature]
        if log_factor is not None:
            factor = factor * log_factor.to(self.exact).exp()
        factor = factor.float()[..., None, None]
        drift = drifts[:, :, 0] * factor[..., 0, :, :]
        for r in range(1, drifts.shape[2]):
            drift.addcmul_(drifts[:, :, r], factor[..., r, :, :])
        return drift

    def _squarable(self, drift: Tensor) -> Tensor:
        # In units of S drifts are of order 1; in the data's own units their squares may leave float32.
        return drift if self.settings.normalize_features else drift.to(self.exact)


def _products(drifts: Tensor) -> Tensor:
    """⟨V_τ, V_τ'⟩ of each problem, ``[g, v, R, N, D]`` to ``[g, v, R, R]``."""
    if drifts.device.type != "cpu":
        flat = drifts.flatten(3)
        return flat @ flat.mT
    # On a CPU a batched product of so few rows is one slow call per problem.
    r = drifts.shape[2]
    products = drifts.new_empty(*drifts.shape[:2], r, r)
    for i in range(r):
        for j in range(i, r):
            product = (drifts[:, :, i] * drifts[:, :, j]).sum((-2, -1))
            products[..., i, j] = products[..., j, i] = product
    return products
