"""The three passes of one loss call: scales, drift norms, drift. Between them lie the two collectives."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from driftgen.field import displacement, drift_coefficients, medoid, pairwise_distance
from driftgen.kernels import Kernel, farthest
from driftgen.normalization import MASKED, Normalization
from driftgen.problems import Bucket, Chunk

__all__ = ["PAPER_GUARDS", "RELEASE_GUARDS", "Drift", "Guards", "Passes", "Settings", "Statistics"]

# float32 numbers that one chunk may take when the caller sets no bound: 256 MiB, or 2 GiB where launches are
# dear.
CHUNK_NUMBERS = {"cpu": 2**26, "cuda": 2**29}


@dataclass(frozen=True)
class Guards:
    """The small constants that keep divisions and softmaxes in bounds."""

    self_distance: float  # added to the normalised distance of a sample to itself
    least_affinity: float
    least_distance: float
    least_scale: float  # of the mean distance, and of the unit of the coordinates
    least_drift: float  # of the mean squared drift


PAPER_GUARDS = Guards(math.inf, 0.0, 0.0, 0.0, 0.0)
RELEASE_GUARDS = Guards(100.0, 1e-3, 1e-4, 1e-3, 1e-8)


@dataclass(frozen=True)
class Settings:
    """What a loss was told to do, names resolved."""

    temperatures: tuple[float, ...]
    kernel: Kernel
    normalization: Normalization
    attraction: float
    repulsion: float
    normalize_features: bool
    normalize_drift: bool
    guards: Guards
    weigh_kernel: bool  # weights count copies (paper), or multiply affinities only (release)
    sum_vectors: bool  # one loss per vector, all summed (paper), or their mean per feature (release)
    process_group: dist.ProcessGroup | None
    chunk: int | None


@dataclass(frozen=True)
class Statistics:
    """What the parts of one batch share: the scale ``[features]``, E[‖V_τ‖² / D] ``[features, R]``, and the
    number of groups of the whole batch.
    """

    scale: Tensor
    drift: Tensor
    groups: int


@dataclass
class Drift:
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
        """The gradient to each generated feature, given that of the mean over all groups, one for each
        group.
        """
        gradient = self.values * (upstream[:, None] * self.factor)[:, None, :, None]
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
class Passes:
    """Runs the passes in order: :meth:`measure_scale`, :meth:`measure_drift`, :meth:`combine`.

    ``weight`` is ``[G, T]`` over y = [generated, negatives, positives], or None.
    """

    settings: Settings
    buckets: list[Bucket]
    weight: Tensor | None
    given: Statistics | None = None  # in place of what would be measured over the whole batch
    work: list[_Work] = field(init=False)

    def __post_init__(self) -> None:
        generated = self.buckets[0].generated[0]
        self.device = generated.device
        self.groups, self.n = generated.shape[:2]
        self.t = self.n + sum(s[0].shape[1] for s in _others(self.buckets[0]))
        self.negatives = self.t - self.buckets[0].positives[0].shape[1]
        # Sums over a whole batch keep their digits in float64, where the device has it.
        self.exact = torch.float32 if self.device.type == "mps" else torch.float64
        shapes = {f: (v, b.width) for b in self.buckets for f, v in zip(b.features, b.vectors, strict=True)}
        table = torch.tensor([shapes[f] for f in range(len(shapes))], dtype=self.exact)
        self.vectors, self.widths = table.to(self.device, non_blocking=True).unbind(1)
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

    def measure_scale(self) -> Tensor:
        """First pass and collective: the mean distance of each feature, E_x E_y ‖φ(x) − φ(y)‖, weighted over
        y.
        """
        features = len(self.vectors)
        sums = torch.zeros(2 * features + 1, dtype=self.exact, device=self.device)
        for work in self.work:
            distance = self._distance(work)[1].sum(-2)
            if self.weight is not None:
                distance *= self.weight[work.chunk.g0 : work.chunk.g1, None]
            sums.index_add_(0, work.feature, distance.sum(-1).to(self.exact).sum(0))
        pairs = self.groups * self.t if self.weight is None else self.weight.to(self.exact).sum()
        sums[features:-1] = self.n * self.vectors * pairs
        sums[-1:].fill_(self.groups)
        self._reduce(sums)
        self.all_groups = sums[-1]
        scale = used = sums[:features] / sums[features:-1].clamp(min=torch.finfo(self.exact).tiny)
        if self.given is not None:
            used = self.given.scale.to(scale).expand_as(scale)
            self.all_groups = torch.full_like(sums[-1], self.given.groups)
        if self.settings.normalize_features:
            self.kernel_unit = _guard(used, self.settings.guards.least_scale)
            self.unit = _guard(used / self.widths.sqrt(), self.settings.guards.least_scale)
        else:
            self.kernel_unit = self.unit = torch.ones_like(scale)
        return scale.float()

    def measure_drift(self) -> Tensor:
        """Second pass and collective: E[‖V_τ‖² / D] of each feature and temperature, ``[features, R]``.

        All products ⟨V_τ, V_τ'⟩ are summed, not only the squares: they give the loss of the whole batch
        without a third collective, since ‖Σ_τ V_τ/λ_τ‖² = Σ_ττ' ⟨V_τ, V_τ'⟩ / (λ_τ λ_τ').
        """
        r = len(self.settings.temperatures)
        products = torch.zeros(len(self.vectors), r, r, dtype=self.exact, device=self.device)
        for work in self.work:
            drifts, log_factor = self._drifts(work)
            product = _products(self._squarable(drifts)).to(self.exact)
            if log_factor is not None:
                log_factor = log_factor.to(self.exact)
                product *= (log_factor[..., :, None] + log_factor[..., None, :]).exp()
            products.index_add_(0, work.feature, product.sum(0))
        self._reduce(products)
        count = self.all_groups * self.n * self.vectors * self.widths
        self.products = products / count[:, None, None]
        drift = used = self.products.diagonal(dim1=-2, dim2=-1)
        if self.given is not None:
            used = self.given.drift.to(drift).expand_as(drift)
        if self.settings.normalize_drift:
            squared = _guard(used, self.settings.guards.least_drift, or_else=math.inf)
            self.inverse_norm = squared.rsqrt()
        else:
            self.inverse_norm = torch.ones_like(drift)
        return drift.float()

    def combine(self, keep: bool) -> tuple[Tensor, Tensor, list[Drift]]:
        """Third pass: Ṽ = Σ_τ V_τ / λ_τ. The loss over all processes, per group of this one, and (if
        ``keep``) Ṽ itself.
        """
        features = self.vectors if self.settings.sum_vectors else torch.ones_like(self.vectors)
        per_feature = torch.einsum("frs,fr,fs->f", self.products, self.inverse_norm, self.inverse_norm)
        loss = (per_feature * features).sum()
        share = features / (self.vectors * self.n * self.widths)
        per_group = torch.zeros(self.groups, dtype=self.exact, device=self.device)
        size = torch.ldexp(torch.ones_like(per_feature), torch.frexp(per_feature.sqrt()).exponent)
        kept = [self._empty_drift(bucket, share, size) for bucket in self.buckets] if keep else []
        for work in self.work:
            drift = self._combined(work)
            c = work.chunk
            squares = self._squarable(drift).square().sum((-2, -1)).to(self.exact)
            per_group[c.g0 : c.g1] += squares @ share[work.feature]
            if keep:
                target = kept[work.bucket]
                drift *= target.mantissa[c.v0 : c.v1, None, None]
                target.values[c.g0 : c.g1, :, c.v0 : c.v1] = drift.transpose(1, 2)
        return loss.float(), per_group.float(), kept

    def _empty_drift(self, bucket: Bucket, share: Tensor, size: Tensor) -> Drift:
        dtype = functools.reduce(torch.promote_types, {t.dtype for t in bucket.generated})
        feature = bucket.feature_of_vector(self.device)
        size = size[feature]
        mantissa, exponent = torch.frexp((-2 * share / (self.unit * self.all_groups))[feature] * size)
        exponent = exponent.clamp(max=100)  # the gradient to denormal features would leave float32
        values = torch.empty(bucket.shape, dtype=dtype, device=self.device)
        power = torch.ldexp(torch.ones_like(size), exponent)
        features = [(t.shape[2], t.dtype) for t in bucket.generated]
        return Drift(values, (mantissa / size).float(), power.float(), features)

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
        y = (y - centre).float().div_(self.unit[work.feature, None, None].float())
        x = y[:, :, : self.n]
        distance = distance.div_(self.kernel_unit[work.feature, None, None].float())
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

    def _combined(self, work: _Work) -> Tensor:
        drifts, log_factor = self._drifts(work)
        work.drifts = None
        factor = self.inverse_norm[work.feature]
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

    def _reduce(self, sums: Tensor) -> None:
        if self.settings.process_group is not None and self.given is None:
            dist.all_reduce(sums, group=self.settings.process_group)


def _others(bucket: Bucket) -> list[list[Tensor]]:
    return [bucket.positives] if bucket.negatives is None else [bucket.negatives, bucket.positives]


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


def _guard(value: Tensor, least: float, or_else: float = 1.0) -> Tensor:
    """At least ``least``; without such a bound, ``or_else`` in place of 0, so that 0/0 becomes 0."""
    return value.clamp(min=least) if least > 0 else torch.where(value > 0, value, or_else)
