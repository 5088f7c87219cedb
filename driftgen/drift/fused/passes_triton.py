"""The passes of the loss as three GPU kernels: sum of distances, products of drifts, gradient. The last is in
``gradient_triton``.

One program computes one problem: the N generated samples x of one group and vector, with its M unconditional
negatives u and P positives p. Distances, affinities and coefficients stay in registers and shared memory. The
kernels write one result for each problem and leave sums over problems to ``statistics_triton``, so that
results do not depend on the order in which programs finish.

Accuracy. Squared distances |x|² + |y|² − 2xy come from products on the tensor cores, with |y|² read from the
same products, so that equal samples have distance 0 exactly. If samples are close together and far from the
origin, digits would cancel: the products are then repeated in centered coordinates. Narrow vectors and
float32 use differences instead. The drift Σ_j C_ij (y_j − x_i) becomes Σ_j C_ij y_j by subtracting the sum of
the rounded C_ij from C_ii, so that rounding errors scale with differences of samples. The gradient splits
each C_ij into a rounded value and its rounding error. Clusters of float32 samples that are far apart take
another way, see ``far_clusters_triton``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.affinities_triton import (
    affinity,
    column_sum,
    inverse_root,
    kernel_distances,
    load_weights,
    log2_kernel,
    log2_quotient,
    or_else,
    row_distance,
    row_min,
    row_sum,
)
from driftgen.drift.fused.distances_triton import (
    distances_and_norms,
    load_tiles,
    locate_problem,
    sample_norms_size,
)
from driftgen.drift.fused.far_clusters_triton import drift_coordinate, is_far

__all__ = [
    "add_product",
    "products_kernel",
    "row_total",
    "scale_kernel",
    "softmax_terms_size",
    "subtract_row_total",
]


@triton.jit(do_not_specialize=["V"])
def scale_kernel(
    origin, table, feature_of_vector, weight, sums, sample_norms, V, N, M, P, width, min_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum Σ_ij w_j ‖x_i − y_j‖ of each problem. Stores the squared norms of the samples for later passes."""
    pid, group, _, _, gen, neg, pos, stride, _ = locate_problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    sample_norms += pid * sample_norms_size(BN, BM, BP)
    dx, du, dp = distances_and_norms(
        gen, neg, pos, stride, sample_norms, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK
    )
    wx, wu, wp = load_weights(weight, group, N, M, P, WEIGHTED, BN, BM, BP)
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    row = row_distance(dx, min_distance, wx, WEIGH) + row_distance(du, min_distance, wu, WEIGH)
    row += row_distance(dp, min_distance, wp, WEIGH)
    tl.store(sums + pid, tl.sum(tl.where(tl.arange(0, BN) < N, row, 0.0), axis=0))


@triton.jit
def add_product(total, a, y):
    """total + A·y."""
    if y.dtype == tl.float32:
        return tl.dot(a, y, total, input_precision="ieee")
    return tl.dot(a, y, total)


@triton.jit
def row_total(cx, cu, cp, WORK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Row sums Σ_j C_ij of rounded C. 16-bit sums use tensor cores, which saves one instruction per element.

    More than 64 positives use plain sums: with two warp groups, the product with ones gives wrong results.
    """
    if (tl.float32 == WORK) or (BP > 64):
        total = tl.sum(cx.to(tl.float32), axis=1) + tl.sum(cu.to(tl.float32), axis=1)
        return total + tl.sum(cp.to(tl.float32), axis=1)
    total = tl.dot(cx, tl.full((BN, 16), 1.0, WORK))
    total = tl.dot(cu, tl.full((BM, 16), 1.0, WORK), total)
    return tl.max(tl.dot(cp, tl.full((BP, 16), 1.0, WORK), total), axis=1)


@triton.jit
def subtract_row_total(cx, total, WORK: tl.constexpr, BN: tl.constexpr):
    """Subtract Σ_j C_ij from C_ii, so that Σ_j C_ij (y_j − x_i) = Σ_j C_ij y_j up to the rounding of C_ii."""
    i = tl.arange(0, BN)
    return tl.where(i[:, None] == i[None, :], (cx.to(tl.float32) - total[:, None]).to(WORK), cx)


@triton.jit
def _add_products(sums, drifts, R: tl.constexpr):
    """Add ⟨V_τ, V_τ'⟩ of each row for τ ≤ τ', over the coordinates in ``drifts``."""
    updated = ()
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            product = drifts[r] * drifts[s]
            if len(product.shape) == 2:
                product = tl.sum(product, axis=1)
            updated = updated + (sums[r * R - r * (r + 1) // 2 + s] + product,)
    return updated


@triton.jit
def _zero_products(R: tl.constexpr, BN: tl.constexpr):
    sums = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        sums = sums + (tl.zeros((BN,), tl.float32),)
    return sums


@triton.jit
def _products_of_drifts(
    samples, by_x, by_u, by_p, DIRECT: tl.constexpr, WORK: tl.constexpr, R: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """⟨V_τ, V_τ'⟩ of each row, with V = C y."""
    gen, neg, pos, stride, N, M, P, width = samples
    sums = _zero_products(R, BN)
    for k in range(0, width, BK):
        x, u, p = load_tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drifts = ()
        for r in tl.static_range(R):
            drift = add_product(tl.zeros((BN, BK), tl.float32), by_x[r], x)
            drifts = drifts + (add_product(add_product(drift, by_u[r], u), by_p[r], p),)
        sums = _add_products(sums, drifts, R)
    return sums


@triton.jit
def _products_of_differences(
    samples, by_x, by_u, by_p, R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr
):
    """⟨V_τ, V_τ'⟩ of each row, with V = Σ_j C_ij (y_j − x_i)."""
    sums = _zero_products(R, BN)
    for k in range(samples[7]):
        drifts = ()
        for r in tl.static_range(R):
            drifts = drifts + (drift_coordinate(samples, k, by_x[r], by_u[r], by_p[r], BN, BM, BP),)
        sums = _add_products(sums, drifts, R)
    return sums


@triton.jit
def _store_products(out, sums, R: tl.constexpr):
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            tl.store(out + r * R + s, tl.sum(sums[r * R - r * (r + 1) // 2 + s], axis=0))


# Softmax terms of a problem, which products_kernel stores for gradient_kernel. Of each generated sample: the
# distances to the nearest of all samples and to the nearest generated sample, and for each temperature the
# factors of its row and column of A, and the sums of A over repelling and attracting samples. Of each other
# sample: the distance to the nearest generated sample, and for each temperature the factor of its column.


@triton.jit
def softmax_terms_size(R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    return BN * (2 + 4 * R) + (BM + BP) * (1 + R)


@triton.jit
def _store(pointer, values, B: tl.constexpr):
    tl.store(pointer + tl.arange(0, B), values)
    return pointer + B


@triton.jit
def _store_2(pointer, a, b, B: tl.constexpr):
    """Store two values of each sample at once."""
    offsets = tl.arange(0, B)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(pointer + offsets, tl.join(a, b))
    return pointer + 2 * B


@triton.jit
def _store_4(pointer, a, b, c, d, B: tl.constexpr):
    """Store four values of each sample at once, in the order a, c, b, d."""
    offsets = tl.arange(0, B)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(pointer + offsets, tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (B, 4)))
    return pointer + 4 * B


@triton.jit(do_not_specialize=["V"])
def products_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, sample_norms, products, softmax_terms,
    V, N, M, P, width, min_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    STORE_TERMS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Products ⟨V_τ, V_τ'⟩ of each problem for τ ≤ τ', ``[problems, R, R]``, in the units of the samples.

    V_i = Σ_j C_ij (y_j − x_i), where C = −repulsion S⁺ A for repelling y and C = attraction S⁻ A for
    attracting y, and S⁻ and S⁺ are the sums of A over repelling and attracting samples.
    """
    pid, group, _, position, gen, neg, pos, stride, _ = locate_problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(units + position * 2).to(tl.float32)
    dx, du, dp = kernel_distances(
        gen, neg, pos, stride, sample_norms + pid * sample_norms_size(BN, BM, BP), unit, N, M, P, width,
        min_distance, self_distance, WORK, RAGGED, DIRECT, MASKED, BN, BM, BP, BK,
    )  # fmt: skip
    wx, wu, wp = load_weights(weight, group, N, M, P, WEIGHTED, BN, BM, BP)
    # Distances between generated samples are symmetric: columns are rows.
    near_x, near_u, near_p = tl.min(dx, axis=1), tl.min(du, axis=0), tl.min(dp, axis=0)
    nearest = tl.minimum(row_min(dx, wx, WEIGHTED_SOFTMAX), row_min(du, wu, WEIGHTED_SOFTMAX))
    nearest = or_else(tl.minimum(nearest, row_min(dp, wp, WEIGHTED_SOFTMAX)), 0.0)
    near_x, near_u, near_p = or_else(near_x, nearest), or_else(near_u, 0.0), or_else(near_p, 0.0)
    terms = softmax_terms + pid * softmax_terms_size(R, BN, BM, BP)
    if STORE_TERMS:
        terms = _store(_store(_store_2(terms, nearest, near_x, BN), near_u, BM), near_p, BP)
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    by_x, by_u, by_p, far = (), (), (), False
    for r in tl.static_range(R):
        rate = 1.0 / (tl.load(temperatures + r) * unit)
        most, high = log2_kernel(nearest, rate, KERNEL), log2_kernel(near_x, rate, KERNEL)
        total = row_sum(du, most, wu, rate, KERNEL, WEIGHTED_SOFTMAX)
        total += row_sum(dp, most, wp, rate, KERNEL, WEIGHTED_SOFTMAX)
        among = tl.sum(tl.exp2(log2_quotient(dx, high[:, None], rate, KERNEL)), axis=1)
        if WEIGHTED_SOFTMAX:
            total += row_sum(dx, most, wx, rate, KERNEL, WEIGHTED_SOFTMAX)
        else:
            total += among * tl.exp2(high - most)
        by_row = inverse_root(total) if BOTH else 1.0 / tl.maximum(total, 1e-30)
        # Padded rows, and rows for which no sample has weight, do not drift.
        by_row = tl.where((tl.arange(0, BN) < N) & (total > 1e-30), by_row, 0.0)
        column_x = inverse_root(among)
        column_u, column_p = (
            inverse_root(column_sum(du, near_u, rate, KERNEL)),
            inverse_root(column_sum(dp, near_p, rate, KERNEL)),
        )
        ax = affinity(
            dx, nearest, by_row, near_x, column_x, wx, rate, floor, KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH
        )
        au = affinity(
            du, nearest, by_row, near_u, column_u, wu, rate, floor, KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH
        )
        ap = affinity(
            dp, nearest, by_row, near_p, column_p, wp, rate, floor, KERNEL, BOTH, WEIGHTED_SOFTMAX, WEIGH
        )
        repelled, attracted = tl.sum(ax, axis=1) + tl.sum(au, axis=1), tl.sum(ap, axis=1)
        repelled, attracted = tl.where(by_row > 0, repelled, 0.0), tl.where(by_row > 0, attracted, 0.0)
        if STORE_TERMS:
            terms = _store_4(terms, by_row, repelled, column_x, attracted, BN)
            terms = _store(_store(terms, column_u, BM), column_p, BP)
        back, forth = (-repulsion * attracted)[:, None], (attraction * repelled)[:, None]
        cx, cu, cp = (back * ax).to(WORK), (back * au).to(WORK), (forth * ap).to(WORK)
        if DIRECT:
            far = far | is_far(cx, cu, cp, dx, du, dp)
        cx = subtract_row_total(cx, row_total(cx, cu, cp, WORK, BN, BM, BP), WORK, BN)
        by_x, by_u, by_p = by_x + (cx,), by_u + (cu,), by_p + (cp,)
    samples = gen, neg, pos, stride, N, M, P, width
    out = products + pid * (R * R)
    if DIRECT:
        if far:
            _store_products(out, _products_of_differences(samples, by_x, by_u, by_p, R, BN, BM, BP), R)
        else:
            _store_products(
                out, _products_of_drifts(samples, by_x, by_u, by_p, DIRECT, WORK, R, BN, BM, BP, BK), R
            )
    else:
        _store_products(
            out, _products_of_drifts(samples, by_x, by_u, by_p, DIRECT, WORK, R, BN, BM, BP, BK), R
        )
