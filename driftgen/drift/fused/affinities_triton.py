"""Affinities of a problem: weights, distances as the kernel sees them, softmax sums, and the matrix A.

Every instruction for each pair and temperature costs 5% of the time. Three choices avoid masks and
logarithms: the distance of padded pairs is PADDED, so that their affinity is 0; softmaxes subtract the logit
of the least distance, which is the same for all temperatures; exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import distances, pair_mask

__all__ = [
    "PADDED",
    "affinity",
    "column_sum",
    "inverse_root",
    "kernel_distances",
    "load_weights",
    "log2_kernel",
    "log2_quotient",
    "or_else",
    "row_distance",
    "row_min",
    "row_sum",
]

LAPLACE = tl.constexpr(0)
GAUSSIAN = tl.constexpr(1)
INVERSE_MULTIQUADRIC = tl.constexpr(2)
PADDED = tl.constexpr(1.0e30)  # the distance of a pair that does not exist
# Constants below 1.2e-38 would promote every expression that they are part of to float64.


@triton.jit
def _load_weight(weight, start, K, B: tl.constexpr, WEIGHTED: tl.constexpr):
    """Weights of the K samples from ``start``, ``[B]``, zero outside."""
    i = tl.arange(0, B)
    if WEIGHTED:
        return tl.load(weight + start + i, mask=i < K, other=0.0)
    return tl.where(i < K, 1.0, 0.0)


@triton.jit
def load_weights(
    weight, group, N, M, P, WEIGHTED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr
):
    """Weights of the generated samples, negatives and positives of a group."""
    first = group * (N + M + P)
    return (
        _load_weight(weight, first, N, BN, WEIGHTED),
        _load_weight(weight, first + N, M, BM, WEIGHTED),
        _load_weight(weight, first + N + M, P, BP, WEIGHTED),
    )


@triton.jit
def log2_kernel(distance, rate, KERNEL: tl.constexpr):
    """log₂ k, given 1 / (τ · unit); see ``driftgen.drift.kernels``."""
    return log2_quotient(distance, 0.0, rate, KERNEL)


@triton.jit
def log2_quotient(distance, reference, rate, KERNEL: tl.constexpr):
    """log₂ k − reference."""
    if KERNEL == LAPLACE:
        # An explicit FMA: the compiler would otherwise share the product and spend one more addition per use.
        return tl.fma(distance, rate * -1.4426950408889634, -reference)  # log₂ e
    ratio = tl.minimum(distance * rate, 1e18)
    if KERNEL == GAUSSIAN:
        return tl.fma(ratio * ratio, -0.7213475204444817, -reference)  # ½ log₂ e
    return tl.fma(tl.log2(1.0 + ratio * ratio), -0.5, -reference)


@triton.jit
def _pad_distance(distance, min_distance, N, K, BN: tl.constexpr, B: tl.constexpr, RAGGED: tl.constexpr):
    """Clamp distances from below. Set those of padded pairs to PADDED."""
    distance = tl.maximum(distance, min_distance)
    return tl.where(pair_mask(N, K, BN, B), distance, PADDED) if RAGGED else distance


@triton.jit
def row_min(distance, w, WEIGHTED_SOFTMAX: tl.constexpr):
    """Least distance in each row. If weights count copies, samples without weight are left out."""
    if WEIGHTED_SOFTMAX:
        distance = tl.where((w > 0)[None, :], distance, PADDED)
    return tl.min(distance, axis=1)


@triton.jit
def or_else(distance, other):
    """Replace the minimum over no samples by ``other``.

    2^(l − l(PADDED)) would be arbitrary: l is rounded once as part of an FMA, but twice by itself.
    """
    return tl.where(distance < 0.5 * PADDED, distance, other)


@triton.jit
def kernel_distances(
    gen, neg, pos, stride, sample_norms, unit, N, M, P, width, min_distance, self_distance,
    WORK: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, MASKED: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Distances with guards, padding and self-distance, the same for all temperatures."""
    dx, du, dp = distances(gen, neg, pos, stride, sample_norms, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    dx = _pad_distance(dx, min_distance, N, N, BN, BN, RAGGED)
    du = _pad_distance(du, min_distance, N, M, BN, BM, RAGGED)
    dp = _pad_distance(dp, min_distance, N, P, BN, BP, RAGGED)
    i = tl.arange(0, BN)
    dx = tl.where(i[:, None] == i[None, :], PADDED if MASKED else dx + self_distance * unit, dx)
    return dx, du, dp


@triton.jit
def row_sum(distance, most, w, rate, KERNEL: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr):
    """Σ_y w k / 2^most of each x."""
    exponent = log2_quotient(distance, most[:, None], rate, KERNEL)
    if WEIGHTED_SOFTMAX:
        return tl.sum(tl.exp2(tl.minimum(exponent, 0.0)) * w[None, :], axis=1)
    return tl.sum(tl.exp2(exponent), axis=1)


@triton.jit
def column_sum(distance, near, rate, KERNEL: tl.constexpr):
    """Σ_x k / k(near) of each y."""
    return tl.sum(
        tl.exp2(log2_quotient(distance, log2_kernel(near, rate, KERNEL)[None, :], rate, KERNEL)), axis=0
    )


@triton.jit
def inverse_root(total):
    return tl.rsqrt(tl.maximum(total, 1e-30))


@triton.jit
def affinity(
    distance, nearest, by_row, near, by_column, w, rate, floor,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """Matrix A with the floor of the release, times the weights, which are 0 for padded samples.

    √(softmax_y · softmax_x) = 2^(l − ½ max_y l − ½ max_x l) / √(Σ_y · Σ_x): no exponent exceeds 0, no sum is
    below 1, and no logarithm is needed, which takes 25 instructions.
    """
    most = log2_kernel(nearest, rate, KERNEL)
    if BOTH:
        exponent = log2_quotient(distance, 0.5 * most[:, None], rate, KERNEL)
        exponent -= 0.5 * log2_kernel(near, rate, KERNEL)[None, :]
    else:
        exponent = log2_quotient(distance, most[:, None], rate, KERNEL)
    if WEIGHTED_SOFTMAX:
        exponent = tl.minimum(exponent, 60.0)  # only samples without weight exceed it
    a = tl.exp2(exponent) * by_row[:, None]
    if BOTH:
        a *= by_column[None, :]
    a = tl.maximum(a, floor)
    return a * w[None, :] if WEIGH else a


@triton.jit
def row_distance(distance, min_distance, w, WEIGH: tl.constexpr):
    """Σ_y w ‖x − y‖ of each x."""
    distance = tl.maximum(distance, min_distance)
    return tl.sum(distance * w[None, :] if WEIGH else distance, axis=1)
