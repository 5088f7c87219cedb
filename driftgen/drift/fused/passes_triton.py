"""The loss as three GPU kernels, one program for each problem: sum of distances, products of drifts,
gradient.

A problem is the N generated samples x of one group and vector, with its M unconditional negatives u and P
positives p. Everything between the samples and the result stays on the chip: distances, affinities and
coefficients of a problem are never written to memory. Sums over problems are left to the caller, so that
results do not depend on the order in which programs end.

What makes the arithmetic hold: squared distances come from products on the tensor cores, |x|² + |y|² − 2xy,
with |y|² read from the same products, so that equal samples have distance 0 exactly. Where samples lie close
together and far from the origin, so that digits would cancel, the products are made again in coordinates
without the common part. Narrow vectors and float32 take differences instead. The drift Σ_j C_ij (y_j − x_i)
has minus the sum of the C_ij, as they were rounded, added to C_ii, so that rounding costs digits of the
differences only. And the gradient takes each C_ij in two halves, the second one being what rounding took from
the first.

What makes it fast: one instruction more for each pair and temperature is 5% of the time. So pairs that do not
exist are far away, and need no mask; softmaxes take their largest logit from the least distance, which is the
same for all temperatures; and exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import (
    GRADIENT,
    address,
    distances,
    first_distances,
    inside_of,
    left_width,
    problem,
    tiles,
)

__all__ = ["gradient_kernel", "products_kernel", "scale_kernel"]

LAPLACE = tl.constexpr(0)
GAUSSIAN = tl.constexpr(1)
INVERSE_MULTIQUADRIC = tl.constexpr(2)
NOWHERE = tl.constexpr(1.0e30)  # the distance of a pair that does not exist
# Beware of constants below 1.2e-38: they would make everything they touch float64.


@triton.jit
def _weight(weight, start, K, B: tl.constexpr, WEIGHTED: tl.constexpr):
    """w of the K samples that begin at ``start``, ``[B]``, zero outside."""
    i = tl.arange(0, B)
    if WEIGHTED:
        return tl.load(weight + start + i, mask=i < K, other=0.0)
    return tl.where(i < K, 1.0, 0.0)


@triton.jit
def _weights(
    weight, group, N, M, P, WEIGHTED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr
):
    first = group * (N + M + P)
    return (
        _weight(weight, first, N, BN, WEIGHTED),
        _weight(weight, first + N, M, BM, WEIGHTED),
        _weight(weight, first + N + M, P, BP, WEIGHTED),
    )


@triton.jit
def _log2_kernel(distance, rate, KERNEL: tl.constexpr):
    """log₂ k, given 1 / (τ · unit); see ``driftgen.drift.kernels``."""
    return _log2_quotient(distance, 0.0, rate, KERNEL)


@triton.jit
def _log2_quotient(distance, reference, rate, KERNEL: tl.constexpr):
    """log₂ k − reference."""
    if KERNEL == LAPLACE:
        # Written as one instruction, since the product alone would be shared, and added to in each place.
        return tl.fma(distance, rate * -1.4426950408889634, -reference)  # log₂ e
    ratio = tl.minimum(distance * rate, 1e18)
    if KERNEL == GAUSSIAN:
        return tl.fma(ratio * ratio, -0.7213475204444817, -reference)  # ½ log₂ e
    return tl.fma(tl.log2(1.0 + ratio * ratio), -0.5, -reference)


@triton.jit
def _prepared(distance, least_distance, N, K, BN: tl.constexpr, B: tl.constexpr, RAGGED: tl.constexpr):
    """The distance to what does not exist is beyond all others."""
    distance = tl.maximum(distance, least_distance)
    return tl.where(inside_of(N, K, BN, B), distance, NOWHERE) if RAGGED else distance


@triton.jit
def _nearest(distance, w, WEIGH_KERNEL: tl.constexpr):
    """The least distance in each row; what has no weight does not count where weights count copies."""
    if WEIGH_KERNEL:
        distance = tl.where((w > 0)[None, :], distance, NOWHERE)
    return tl.min(distance, axis=1)


@triton.jit
def _or(distance, other):
    """The other one for those that have nothing near: 2^(l − l(NOWHERE)) would be anything at all, since l is
    rounded once in a product with a sum, and twice by itself.
    """
    return tl.where(distance < 0.5 * NOWHERE, distance, other)


@triton.jit
def _pairs(
    gen, neg, pos, stride, left, unit, N, M, P, width, least_distance, self_distance,
    WORK: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, MASKED: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Distances as all temperatures see them."""
    dx, du, dp = distances(gen, neg, pos, stride, left, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    dx = _prepared(dx, least_distance, N, N, BN, BN, RAGGED)
    du = _prepared(du, least_distance, N, M, BN, BM, RAGGED)
    dp = _prepared(dp, least_distance, N, P, BN, BP, RAGGED)
    i = tl.arange(0, BN)
    dx = tl.where(i[:, None] == i[None, :], NOWHERE if MASKED else dx + self_distance * unit, dx)
    return dx, du, dp


@triton.jit
def _row_sum(distance, most, w, rate, KERNEL: tl.constexpr, WEIGH_KERNEL: tl.constexpr):
    exponent = _log2_quotient(distance, most[:, None], rate, KERNEL)
    if WEIGH_KERNEL:
        return tl.sum(tl.exp2(tl.minimum(exponent, 0.0)) * w[None, :], axis=1)
    return tl.sum(tl.exp2(exponent), axis=1)


@triton.jit
def _column_sum(distance, near, rate, KERNEL: tl.constexpr):
    return tl.sum(
        tl.exp2(_log2_quotient(distance, _log2_kernel(near, rate, KERNEL)[None, :], rate, KERNEL)), axis=0
    )


@triton.jit
def _root(total):
    return tl.rsqrt(tl.maximum(total, 1e-30))


@triton.jit
def _affinity(
    distance, nearest, by_row, near, by_column, w, rate, floor,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, WEIGH_KERNEL: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """A, with the floor of the release, times the weights, which are 0 for what does not exist.

    √(softmax_y · softmax_x) = 2^(l − ½ max_y l − ½ max_x l) / √(Σ_y · Σ_x): no exponent above 0, no sum below
    1, and no logarithm, which takes 25 instructions.
    """
    most = _log2_kernel(nearest, rate, KERNEL)
    if BOTH:
        exponent = _log2_quotient(distance, 0.5 * most[:, None], rate, KERNEL)
        exponent -= 0.5 * _log2_kernel(near, rate, KERNEL)[None, :]
    else:
        exponent = _log2_quotient(distance, most[:, None], rate, KERNEL)
    if WEIGH_KERNEL:
        exponent = tl.minimum(exponent, 60.0)  # only what has no weight can lie so high above the others
    a = tl.exp2(exponent) * by_row[:, None]
    if BOTH:
        a *= by_column[None, :]
    a = tl.maximum(a, floor)
    return a * w[None, :] if WEIGH else a


@triton.jit
def _row_distance(distance, least_distance, w, WEIGH: tl.constexpr):
    distance = tl.maximum(distance, least_distance)
    return tl.sum(distance * w[None, :] if WEIGH else distance, axis=1)


@triton.jit(do_not_specialize=["V"])
def scale_kernel(
    origin, table, feature_of_vector, weight, sums, left, V, N, M, P, width, least_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_ij w_j ‖x_i − y_j‖ of each problem."""
    pid, group, _, _, gen, neg, pos, stride, _ = problem(origin, table, feature_of_vector, V, N, M, P, width)
    left += pid * left_width(BN, BM, BP)
    dx, du, dp = first_distances(gen, neg, pos, stride, left, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    wx, wu, wp = _weights(weight, group, N, M, P, WEIGHTED, BN, BM, BP)
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    row = _row_distance(dx, least_distance, wx, WEIGH) + _row_distance(du, least_distance, wu, WEIGH)
    row += _row_distance(dp, least_distance, wp, WEIGH)
    tl.store(sums + pid, tl.sum(tl.where(tl.arange(0, BN) < N, row, 0.0), axis=0))


@triton.jit
def _add_product(total, a, y):
    """total + A·y."""
    if y.dtype == tl.float32:
        return tl.dot(a, y, total, input_precision="ieee")
    return tl.dot(a, y, total)


@triton.jit
def _row_total(cx, cu, cp, WORK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Σ_j C_ij of rounded C; on tensor cores, where adding 16-bit numbers costs one instruction a number.

    Not for more positives: built for two warp groups, the product with ones came out wrong.
    """
    if (tl.float32 == WORK) or (BP > 64):
        total = tl.sum(cx.to(tl.float32), axis=1) + tl.sum(cu.to(tl.float32), axis=1)
        return total + tl.sum(cp.to(tl.float32), axis=1)
    total = tl.dot(cx, tl.full((BN, 16), 1.0, WORK))
    total = tl.dot(cu, tl.full((BM, 16), 1.0, WORK), total)
    return tl.max(tl.dot(cp, tl.full((BP, 16), 1.0, WORK), total), axis=1)


@triton.jit
def _without_own(cx, total, WORK: tl.constexpr, BN: tl.constexpr):
    """C with −Σ_j C_ij added to C_ii: then Σ_j C_ij (y_j − x_i) = Σ_j C_ij y_j, up to the rounding of C_ii,
    which is itself no more than what rounding left of the sum.
    """
    i = tl.arange(0, BN)
    return tl.where(i[:, None] == i[None, :], (cx.to(tl.float32) - total[:, None]).to(WORK), cx)


# What the products leave for the gradient, some numbers for each problem. Of each generated sample: the
# nearest of all samples and of the generated ones, and for each temperature the factors of its row and of its
# column of A, and the sums of A over what repels it and what attracts it. Of each other sample: the nearest
# generated one, and for each temperature the factor of its column.


@triton.jit
def _kept_width(R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    return BN * (2 + 4 * R) + (BM + BP) * (1 + R)


@triton.jit
def _put(pointer, values, B: tl.constexpr):
    tl.store(pointer + tl.arange(0, B), values)
    return pointer + B


@triton.jit
def _put_2(pointer, a, b, B: tl.constexpr):
    """Two numbers of each sample, in one store."""
    offsets = tl.arange(0, B)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(pointer + offsets, tl.join(a, b))
    return pointer + 2 * B


@triton.jit
def _put_4(pointer, a, b, c, d, B: tl.constexpr):
    """Four numbers of each sample, in the order a, c, b, d."""
    offsets = tl.arange(0, B)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(pointer + offsets, tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (B, 4)))
    return pointer + 4 * B


@triton.jit
def _get(pointer, B: tl.constexpr, STEP: tl.constexpr):
    return tl.load(pointer + STEP * tl.arange(0, B))


@triton.jit(do_not_specialize=["V"])
def products_kernel(
    origin, table, feature_of_vector, weight, numbers, temperatures, left, products, kept,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    KEEP: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """⟨V_τ, V_τ'⟩ of each problem for τ ≤ τ', ``[problems, R, R]``, in the units of the samples.

    V_i = Σ_j C_ij (y_j − x_i), with S the sums of A over what repels and what attracts, and C = −a⁻ S⁺ A, or
    a⁺ S⁻ A where y attracts.
    """
    pid, group, _, position, gen, neg, pos, stride, _ = problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(numbers + position * (3 + 2 * R) + 1)
    dx, du, dp = _pairs(
        gen, neg, pos, stride, left + pid * left_width(BN, BM, BP), unit, N, M, P, width, least_distance,
        self_distance, WORK, RAGGED, DIRECT, MASKED, BN, BM, BP, BK,
    )  # fmt: skip
    wx, wu, wp = _weights(weight, group, N, M, P, WEIGHTED, BN, BM, BP)
    # Distances between generated samples are symmetric: columns are rows.
    near_x, near_u, near_p = tl.min(dx, axis=1), tl.min(du, axis=0), tl.min(dp, axis=0)
    nearest = tl.minimum(_nearest(dx, wx, WEIGH_KERNEL), _nearest(du, wu, WEIGH_KERNEL))
    nearest = _or(tl.minimum(nearest, _nearest(dp, wp, WEIGH_KERNEL)), 0.0)
    near_x, near_u, near_p = _or(near_x, nearest), _or(near_u, 0.0), _or(near_p, 0.0)
    keep = kept + pid * _kept_width(R, BN, BM, BP)
    if KEEP:
        keep = _put(_put(_put_2(keep, nearest, near_x, BN), near_u, BM), near_p, BP)
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    by_x, by_u, by_p = (), (), ()
    for r in tl.static_range(R):
        rate = 1.0 / (tl.load(temperatures + r) * unit)
        most, high = _log2_kernel(nearest, rate, KERNEL), _log2_kernel(near_x, rate, KERNEL)
        total = _row_sum(du, most, wu, rate, KERNEL, WEIGH_KERNEL)
        total += _row_sum(dp, most, wp, rate, KERNEL, WEIGH_KERNEL)
        among = tl.sum(tl.exp2(_log2_quotient(dx, high[:, None], rate, KERNEL)), axis=1)
        if WEIGH_KERNEL:
            total += _row_sum(dx, most, wx, rate, KERNEL, WEIGH_KERNEL)
        else:
            total += among * tl.exp2(high - most)
        by_row = _root(total) if BOTH else 1.0 / tl.maximum(total, 1e-30)
        # Rows that do not exist, and those without any weight to pull, move nothing.
        by_row = tl.where((tl.arange(0, BN) < N) & (total > 1e-30), by_row, 0.0)
        column_x = _root(among)
        column_u, column_p = (
            _root(_column_sum(du, near_u, rate, KERNEL)),
            _root(_column_sum(dp, near_p, rate, KERNEL)),
        )
        ax = _affinity(
            dx, nearest, by_row, near_x, column_x, wx, rate, floor, KERNEL, BOTH, WEIGH_KERNEL, WEIGH
        )
        au = _affinity(
            du, nearest, by_row, near_u, column_u, wu, rate, floor, KERNEL, BOTH, WEIGH_KERNEL, WEIGH
        )
        ap = _affinity(
            dp, nearest, by_row, near_p, column_p, wp, rate, floor, KERNEL, BOTH, WEIGH_KERNEL, WEIGH
        )
        repelled, attracted = tl.sum(ax, axis=1) + tl.sum(au, axis=1), tl.sum(ap, axis=1)
        repelled, attracted = tl.where(by_row > 0, repelled, 0.0), tl.where(by_row > 0, attracted, 0.0)
        if KEEP:
            keep = _put_4(keep, by_row, repelled, column_x, attracted, BN)
            keep = _put(_put(keep, column_u, BM), column_p, BP)
        back, forth = (-repulsion * attracted)[:, None], (attraction * repelled)[:, None]
        cx, cu, cp = (back * ax).to(WORK), (back * au).to(WORK), (forth * ap).to(WORK)
        cx = _without_own(cx, _row_total(cx, cu, cp, WORK, BN, BM, BP), WORK, BN)
        by_x, by_u, by_p = by_x + (cx,), by_u + (cu,), by_p + (cp,)
    sums = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        sums = sums + (tl.zeros((BN,), tl.float32),)
    for k in range(0, width, BK):
        x, u, p = tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drifts = ()
        for r in tl.static_range(R):
            drift = _add_product(tl.zeros((BN, BK), tl.float32), by_x[r], x)
            drifts = drifts + (_add_product(_add_product(drift, by_u[r], u), by_p[r], p),)
        found = ()
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                found = found + (sums[r * R - r * (r + 1) // 2 + s] + tl.sum(drifts[r] * drifts[s], axis=1),)
        sums = found
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            tl.store(products + (pid * R + r) * R + s, tl.sum(sums[r * R - r * (r + 1) // 2 + s], axis=0))


@triton.jit
def _combined(
    distance, keep, near_at, near_step: tl.constexpr, column_at, column_step: tl.constexpr, pull_at, sign, w,
    inverse_norms, temperatures, unit, floor,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, WEIGH_KERNEL: tl.constexpr, WEIGH: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Σ_τ C_τ / λ_τ of one set, from what the products left: where its nearest and the factors of its columns
    are, and the sums of A that pull it.
    """
    nearest, near = _get(keep, BN, 2), _get(keep + near_at, B, near_step)
    keep += 2 * BN + BM + BP
    total = tl.zeros((BN, B), tl.float32)
    for r in tl.static_range(R):
        rate = 1.0 / (tl.load(temperatures + r) * unit)
        by_row, by_column = _get(keep, BN, 4), _get(keep + column_at, B, column_step)
        pull = (sign * tl.load(inverse_norms + r)) * _get(keep + pull_at, BN, 4)
        total += pull[:, None] * _affinity(
            distance, nearest, by_row, near, by_column, w, rate, floor, KERNEL, BOTH, WEIGH_KERNEL, WEIGH
        )
        keep += 4 * BN + BM + BP
    return total


@triton.jit(do_not_specialize=["V", "by_group"])
def gradient_kernel(
    origin, table, feature_of_vector, weight, numbers, temperatures, left, kept, upstream,
    by_group, V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """upstream · factor · Σ_τ V_τ / λ_τ, into the gradient of each generated sample."""
    pid, group, feature, position, gen, neg, pos, stride, start = problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(numbers + position * (3 + 2 * R) + 1)
    dx, du, dp = _pairs(
        gen, neg, pos, stride, left + pid * left_width(BN, BM, BP), unit, N, M, P, width, least_distance,
        self_distance, WORK, RAGGED, DIRECT, MASKED, BN, BM, BP, BK,
    )  # fmt: skip
    wx, wu, wp = _weights(weight, group, N, M, P, WEIGHTED, BN, BM, BP)
    keep = kept + pid * _kept_width(R, BN, BM, BP)
    row = numbers + position * (3 + 2 * R) + 3 + R
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    # One set after the other: the distances of all and the coefficients of all would not fit the registers.
    cx = _combined(
        dx, keep, 1, 2, 1, 4, 3, -repulsion, wx, row, temperatures, unit, floor,
        KERNEL, BOTH, WEIGH_KERNEL, WEIGH, R, BN, BM, BP, BN,
    )  # fmt: skip
    cu = _combined(
        du, keep, 2 * BN, 1, 4 * BN, 1, 3, -repulsion, wu, row, temperatures, unit, floor,
        KERNEL, BOTH, WEIGH_KERNEL, WEIGH, R, BN, BM, BP, BM,
    )  # fmt: skip
    cp = _combined(
        dp, keep, 2 * BN + BM, 1, 4 * BN + BM, 1, 2, attraction, wp, row, temperatures, unit, floor,
        KERNEL, BOTH, WEIGH_KERNEL, WEIGH, R, BN, BM, BP, BP,
    )  # fmt: skip
    hx, hu, hp = cx.to(WORK), cu.to(WORK), cp.to(WORK)
    total = _row_total(hx, hu, hp, WORK, BN, BM, BP)
    if tl.float32 != WORK:
        lx, lu, lp = (
            (cx - hx.to(tl.float32)).to(WORK),
            (cu - hu.to(tl.float32)).to(WORK),
            (cp - hp.to(tl.float32)).to(WORK),
        )
        # What the halves leave together goes into the lower one, which has room for it.
        lx = _without_own(lx, total + _row_total(lx, lu, lp, WORK, BN, BM, BP), WORK, BN)
    else:
        hx = _without_own(hx, total, WORK, BN)
    factor = tl.load(numbers + position * (3 + 2 * R) + 2) * tl.load(upstream + group * by_group)
    out = address(origin, table, feature, GRADIENT) + start
    i = tl.arange(0, BN)
    for k in range(0, width, BK):
        x, u, p = tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drift = _add_product(tl.zeros((BN, BK), tl.float32), hx, x)
        drift = _add_product(_add_product(drift, hu, u), hp, p)
        if tl.float32 != WORK:
            drift = _add_product(_add_product(_add_product(drift, lx, x), lu, u), lp, p)
        drift *= factor
        column = k + tl.arange(0, BK)
        inside = (i < N)[:, None] & (column < width)[None, :]
        tl.store(out + i[:, None] * stride + column[None, :], drift.to(out.dtype.element_ty), mask=inside)
