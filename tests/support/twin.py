"""Brute-force float64 twin of the field and the loss. Shares no code with the library.

Affinities stay logarithms, and a drift is V_i = exp(log_factor_i) · v_i, so that nothing underflows before
drifts are normalized. Drifts are sums of coefficients times differences of samples: distant clusters cost no
digits.
"""

from typing import NamedTuple

import numpy as np

KERNELS = {
    "laplace": lambda d, t: -d / t,
    "gaussian": lambda d, t: -((d / t) ** 2) / 2,
    "inverse_multiquadric": lambda d, t: -np.log1p((d / t) ** 2) / 2,
}
"""log k(d, τ)."""


class Drift(NamedTuple):
    """V_i = exp(log_factor_i) · values_i. Rounding errors of V_i scale with ``terms``, which have the same
    factor: Σ_j |C_ij| (‖y_j − x_i‖ + rounding · the largest distance). ``floors`` are their second part,
    which does not shrink with the differences.
    """

    values: np.ndarray  # [..., N, D]
    terms: np.ndarray  # [..., N]
    log_factor: np.ndarray  # [..., N]
    floors: np.ndarray  # [..., N]


class Loss(NamedTuple):
    """Results of a loss: of each group, mean distance, mean squared drifts, and the gradient of the sum over
    groups. ``terms`` are to the gradient what those of a drift are to the drift.

    Errors ε · floors of the drifts are errors of other results, in the norm ‖V‖² = mean of V² over samples
    and coordinates: at most ε · drift_floors of √drift, and ε · loss_floors of √per_group.
    """

    per_group: np.ndarray
    scale: float
    drift: np.ndarray
    gradient: np.ndarray
    terms: np.ndarray
    cancellation: float  # size of drifts relative to their terms, of the temperature where it is least
    drift_floors: np.ndarray  # one for each temperature
    loss_floors: np.ndarray  # one for each group


def distances(x, y):
    return np.stack([np.sqrt(((row - y) ** 2).sum(-1)) for row in x])  # row by row: all pairs would be large


def softmax(logits, axis):
    e = np.exp(logits - logits.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def log_sum(logits, axis):
    most = logits.max(axis=axis, keepdims=True)
    most = np.where(np.isfinite(most), most, 0)
    with np.errstate(divide="ignore"):
        return most + np.log(np.exp(logits - most).sum(axis=axis, keepdims=True))


def subtract(logits, sums):
    """logits − sums, where a pair that does not exist (−∞) or a sum over nothing leaves no affinity."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(sums) & np.isfinite(logits), logits - sums, -np.inf)


def coefficients(logits, weight, negatives, normalization="both", multiplicity=False, factors=(1.0, 1.0)):
    """C with V_i = exp(log_factor_i) Σ_j C_ij (y_j − x_i), and log_factor, from log k ``[N, T]`` of the
    negatives, then the positives. With ``multiplicity`` a weight counts copies: it also multiplies terms of
    sums over y.
    """
    with np.errstate(divide="ignore"):
        log_weight = np.log(weight)
    rows = subtract(logits, log_sum(logits + log_weight if multiplicity else logits, 1))
    k = logits
    for _ in range(3000 if normalization == "sinkhorn" else 0):
        k = subtract(k, log_sum(k, 0))
        k = subtract(k, log_sum(k, 1))
    a = {"both": (rows + subtract(logits, log_sum(logits, 0))) / 2, "y": rows}.get(
        normalization, k
    ) + log_weight
    most = [part.max(1, keepdims=True) for part in (a[:, :negatives], a[:, negatives:])]
    log_factor = np.where(np.isfinite(most[0] + most[1]), most[0] + most[1], -np.inf)[:, 0]
    repelled, attracted = (
        np.exp(part - np.where(np.isfinite(m), m, 0))
        for part, m in zip((a[:, :negatives], a[:, negatives:]), most, strict=True)
    )
    sums = repelled.sum(1, keepdims=True), attracted.sum(1, keepdims=True)
    return np.concatenate([-factors[1] * repelled * sums[1], factors[0] * attracted * sums[0]], 1), log_factor


def move(c, x, y, log_factor, rounding):
    """Σ_j C_ij (y_j − x_i)."""
    values = np.stack([row @ (y - at) for row, at in zip(c, x, strict=True)])
    d = distances(x, y)
    floors = np.abs(c).sum(1) * rounding * d.max()
    return Drift(values, (np.abs(c) * d).sum(1) + floors, log_factor, floors)


def log_field(x, pos, neg=None, *, temperature, normalization="both", kernel="laplace", attraction=1.0,
              repulsion=1.0, wp=None, wn=None, multiplicity=False, own=None, rounding=1e-12):  # fmt: skip
    """Algorithm 2 for one problem, weights after normalization. A sample and itself are no pair (the paper
    adds 10⁶ to the distance). ``own``: the first negatives are x; by default if there are no others.
    """
    x, pos = np.asarray(x, np.float64), np.asarray(pos, np.float64)
    own = neg is None if own is None else own
    neg = x if neg is None else np.asarray(neg, np.float64)
    y = np.concatenate([neg, pos])
    weights = [np.ones(len(t)) if w is None else np.asarray(w, np.float64) for t, w in ((neg, wn), (pos, wp))]
    logits = KERNELS[kernel](distances(x, y), temperature)
    if own:
        logits[np.arange(len(x)), np.arange(len(x))] = -np.inf
    factors = attraction, repulsion
    c, log_factor = coefficients(
        logits, np.concatenate(weights), len(neg), normalization, multiplicity, factors
    )
    return move(c, x, y, log_factor, rounding)


def field(x, pos, neg=None, **options):
    """V, which may underflow."""
    drift = log_field(x, pos, neg, **options)
    return drift.values * np.exp(drift.log_factor)[:, None]


def mmd(x, pos, temperature, kernel):
    """−½ times the gradient of 2 E ξ(x, x') − 2 E ξ(x, y); a sample exerts no force on itself."""
    x, pos = np.asarray(x, np.float64), np.asarray(pos, np.float64)
    v = np.zeros_like(x)
    for i in range(len(x)):
        for sign, others in ((1, pos), (-1, x)):
            for y in others:
                d = np.sqrt(np.sum((y - x[i]) ** 2))
                unit = temperature if kernel == "gaussian" else d
                if d > 0:
                    v[i] += (
                        sign
                        * np.exp(KERNELS[kernel](d, temperature))
                        * (y - x[i])
                        / (unit * temperature)
                        / len(others)
                    )
    return v


def combine(drifts, scale, unit, min_drift=0.0, normalize_drift=True):
    """Results of a loss from the drifts ``[B, N, D]`` of each temperature in units of ``unit``."""
    total, terms, squares, cancellation, drift_floors, loss_floors = 0, 0, [], 1.0, [], 0
    for values, magnitudes, log_factor, floors in drifts:
        most = np.max(log_factor)
        factor = np.exp(log_factor - most) if np.isfinite(most) else np.zeros_like(log_factor)
        most = most if np.isfinite(most) else 0.0
        values = values * factor[..., None]
        mean, width = (values**2).mean(), values.shape[-1]
        whole = np.sqrt(((magnitudes * factor) ** 2).mean())
        cancellation = min(cancellation, np.sqrt(mean * width) / whole if whole > 0 else 0.0)
        with np.errstate(under="ignore"):
            squares.append(mean * np.exp(2 * most))
        size = np.sqrt(mean) if min_drift == 0 else np.sqrt(max(squares[-1], min_drift))
        size = (size or np.inf) if normalize_drift else np.exp(-most)
        # V/s with s = ‖V‖ is off by δ/s of V and by ‖V_g‖ δ/s² of s, since |‖V + δ‖ − ‖V‖| ≤ ‖δ‖.
        floor = np.sqrt(((floors * factor) ** 2).mean() / width)
        in_group = np.sqrt(((floors * factor) ** 2).mean(1) / width)
        drift_floors.append(floor * np.exp(most))
        own = np.sqrt((values**2).mean((1, 2))) * floor / size if normalize_drift else 0.0
        loss_floors = loss_floors + (in_group + own) / size
        total = total + values / size
        terms = terms + magnitudes * factor / size
    n, width = total.shape[1:]
    gradient = 2 / (n * width * unit)
    per_group = (total**2).mean((1, 2))
    floors = np.array(drift_floors), loss_floors
    return Loss(
        per_group, scale, np.array(squares), -gradient * total, gradient * terms, cancellation, *floors
    )


def release(gen, pos, neg, temperatures, wg, wn, wp, normalize_drift=True, attraction=1.0, repulsion=1.0,
            rounding=1e-12):  # fmt: skip
    """Arithmetic of the released code in float64 on [B, n, D] arrays."""
    gen, pos, neg = (np.asarray(a, np.float64) for a in (gen, pos, neg))
    y, w = np.concatenate([gen, neg, pos], 1), np.concatenate([wg, wn, wp], 1)
    n, width, m = gen.shape[1], gen.shape[2], gen.shape[1] + neg.shape[1]
    d = np.stack([np.maximum(distances(g, t), 1e-4) for g, t in zip(gen, y, strict=True)])
    scale = (d * w[:, None]).mean() / w.mean()
    unit = max(scale / np.sqrt(width), 1e-3)
    dn = d / max(scale, 1e-3)
    for i in range(n):
        dn[:, i, i] += 100
    drifts = []
    for t in temperatures:
        a = np.sqrt(np.maximum(softmax(-dn / t, 2) * softmax(-dn / t, 1), 1e-6)) * w[:, None]
        a_neg, a_pos = a[:, :, :m], a[:, :, m:]
        push, pull = repulsion * a_pos.sum(2, keepdims=True), attraction * a_neg.sum(2, keepdims=True)
        c = np.concatenate([-push * a_neg, pull * a_pos], 2)
        parts = [move(*each, np.zeros(n), rounding) for each in zip(c, gen / unit, y / unit, strict=True)]
        drifts.append(Drift(*(np.stack(part) for part in zip(*parts, strict=True))))
    return combine(drifts, scale, unit, 1e-8, normalize_drift)


def release_loss(*arguments, **options):
    """Return per-group loss, scale, drift, and the gradient of the summed loss."""
    return release(*arguments, **options)[:4]


def paper(gen, pos, neg, temperatures, wg, wn, wp, kernel="laplace", normalization="both", multiplicity=True,
          normalize_features=True, normalize_drift=True, **options):  # fmt: skip
    """Algorithm 2 with S_j and lambda_j of the appendix, in float64 on [B, n, D] arrays."""
    gen, pos, neg = (np.asarray(a, np.float64) for a in (gen, pos, neg))
    n, width = gen.shape[1:]
    y, w = np.concatenate([gen, neg, pos], 1), np.concatenate([wg, wn, wp], 1)
    d = np.stack([distances(g, t) for g, t in zip(gen, y, strict=True)])
    scale = (d * w[:, None]).sum() / (n * w.sum())
    s = (scale or 1.0) / np.sqrt(width) if normalize_features else 1.0
    drifts = []
    for t in temperatures:
        parts = [
            log_field(
                g / s, p / s, np.concatenate([g, u]) / s, own=True, kernel=kernel,
                temperature=t * (np.sqrt(width) if normalize_features else 1.0), normalization=normalization,
                wp=c, wn=np.concatenate([a, b]), multiplicity=multiplicity, **options,
            )
            for g, p, u, a, b, c in zip(gen, pos, neg, wg, wn, wp, strict=True)
        ]  # fmt: skip
        drifts.append(Drift(*(np.stack(part) for part in zip(*parts, strict=True))))
    return combine(drifts, scale, s, 0.0, normalize_drift)


def paper_loss(*arguments, **options):
    """Return the same as ``release_loss``."""
    return paper(*arguments, **options)[:4]
