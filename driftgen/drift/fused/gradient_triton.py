"""The last pass over the problems that one program computes: the gradient. See ``passes_triton``."""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.affinities_triton import affinity, kernel_distances, load_weights
from driftgen.drift.fused.distances_triton import (
    GRADIENT,
    address,
    load_tiles,
    locate_problem,
    sample_norms_size,
)
from driftgen.drift.fused.far_clusters_triton import drift_coordinate, is_far
from driftgen.drift.fused.passes_triton import (
    add_product,
    row_total,
    softmax_terms_size,
    subtract_row_total,
)

__all__ = ["gradient_kernel"]


@triton.jit
def _load(pointer, B: tl.constexpr, STEP: tl.constexpr):
    return tl.load(pointer + STEP * tl.arange(0, B))


@triton.jit
def _combined_coefficients(
    distance, terms, near_at, near_step: tl.constexpr, column_at, column_step: tl.constexpr, pull_at, sign, w,
    inverse_norms, temperatures, unit, floor,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr, WEIGH: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Coefficients Σ_τ C_τ / λ_τ of one set, from the softmax terms.

    ``near_at``, ``column_at`` and ``pull_at`` are the offsets of the set's nearest distances, column factors
    and sums of A.
    """
    nearest, near = _load(terms, BN, 2), _load(terms + near_at, B, near_step)
    terms += 2 * BN + BM + BP
    total = tl.zeros((BN, B), tl.float32)
    for r in tl.static_range(R):
        rate = 1.0 / (tl.load(temperatures + r) * unit)
        by_row, by_column = _load(terms, BN, 4), _load(terms + column_at, B, column_step)
        pull = (sign * tl.load(inverse_norms + r)) * _load(terms + pull_at, BN, 4)
        total += pull[:, None] * affinity(
            distance, nearest, by_row, near, by_column, w, rate, floor, KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH
        )
        terms += 4 * BN + BM + BP
    return total


@triton.jit
def _gradient_of_differences(
    out, samples, cx, cu, cp, factor, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr
):
    """Write factor · Σ_j C_ij (y_j − x_i)."""
    stride, N, i = samples[3], samples[4], tl.arange(0, BN)
    for k in range(samples[7]):
        drift = drift_coordinate(samples, k, cx, cu, cp, BN, BM, BP) * factor
        tl.store(out + i * stride + k, drift.to(out.dtype.element_ty), mask=i < N)


@triton.jit
def _gradient_of_products(
    out, samples, cx, cu, cp, factor, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write factor · C y, with each C_ij as a rounded value and its rounding error."""
    gen, neg, pos, stride, N, M, P, width = samples
    hx, hu, hp = cx.to(WORK), cu.to(WORK), cp.to(WORK)
    total = row_total(hx, hu, hp, WORK, BN, BM, BP)
    if tl.float32 != WORK:
        lx, lu, lp = (
            (cx - hx.to(tl.float32)).to(WORK),
            (cu - hu.to(tl.float32)).to(WORK),
            (cp - hp.to(tl.float32)).to(WORK),
        )
        # The row sums of both halves go into the lower half, where they lose no digits.
        lx = subtract_row_total(lx, total + row_total(lx, lu, lp, WORK, BN, BM, BP), WORK, BN)
    else:
        hx = subtract_row_total(hx, total, WORK, BN)
    i = tl.arange(0, BN)
    for k in range(0, width, BK):
        x, u, p = load_tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drift = add_product(tl.zeros((BN, BK), tl.float32), hx, x)
        drift = add_product(add_product(drift, hu, u), hp, p)
        if tl.float32 != WORK:
            drift = add_product(add_product(add_product(drift, lx, x), lu, u), lp, p)
        drift *= factor
        column = k + tl.arange(0, BK)
        inside = (i < N)[:, None] & (column < width)[None, :]
        tl.store(out + i[:, None] * stride + column[None, :], drift.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["V", "by_group"])
def gradient_kernel(
    origin, table, feature_of_vector, weight, units, norms, temperatures, sample_norms, softmax_terms,
    upstream, by_group, V, N, M, P, width, min_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each generated sample, upstream · factor · Σ_τ V_τ / λ_τ."""
    pid, group, feature, position, gen, neg, pos, stride, offset = locate_problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(units + position * 2).to(tl.float32)
    dx, du, dp = kernel_distances(
        gen, neg, pos, stride, sample_norms + pid * sample_norms_size(BN, BM, BP), unit, N, M, P, width,
        min_distance, self_distance, WORK, RAGGED, DIRECT, MASKED, BN, BM, BP, BK,
    )  # fmt: skip
    wx, wu, wp = load_weights(weight, group, N, M, P, WEIGHTED, BN, BM, BP)
    terms = softmax_terms + pid * softmax_terms_size(R, BN, BM, BP)
    norms += position * (1 + R)
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    # One set at a time: distances and coefficients of all sets together do not fit the registers.
    cx = _combined_coefficients(
        dx, terms, 1, 2, 1, 4, 3, -repulsion, wx, norms + 1, temperatures, unit, floor,
        KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH, R, BN, BM, BP, BN,
    )  # fmt: skip
    cu = _combined_coefficients(
        du, terms, 2 * BN, 1, 4 * BN, 1, 3, -repulsion, wu, norms + 1, temperatures, unit, floor,
        KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH, R, BN, BM, BP, BM,
    )  # fmt: skip
    cp = _combined_coefficients(
        dp, terms, 2 * BN + BM, 1, 4 * BN + BM, 1, 2, attraction, wp, norms + 1, temperatures, unit, floor,
        KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH, R, BN, BM, BP, BP,
    )  # fmt: skip
    factor = tl.load(norms) * tl.load(upstream + group * by_group)
    out = address(origin, table, feature, GRADIENT) + offset
    samples = gen, neg, pos, stride, N, M, P, width
    if DIRECT:
        if is_far(cx, cu, cp, dx, du, dp):
            _gradient_of_differences(out, samples, cx, cu, cp, factor, BN, BM, BP)
        else:
            _gradient_of_products(out, samples, cx, cu, cp, factor, DIRECT, WORK, BN, BM, BP, BK)
    else:
        _gradient_of_products(out, samples, cx, cu, cp, factor, DIRECT, WORK, BN, BM, BP, BK)
