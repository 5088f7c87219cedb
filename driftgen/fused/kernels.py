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
takes away x_i times the sum of the C_ij as they were rounded, so that rounding costs digits of the
differences only. And the gradient takes each C_ij in two halves, the second one being what rounding took from
the first.

What makes it fast: one instruction more for each pair and temperature is 5% of the time. So pairs that do not
exist are far away, and need no mask; softmaxes take their largest logit from the least distance, which is the
same for all temperatures; and exponentials are powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.fused.distances import GRADIENT, address, distances, inside_of, problem, tiles

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
def _log2_kernel(distance, rate, KERNEL: tl.constexpr):
    """log₂ k, given 1 / (τ · unit); see ``driftgen.kernels``."""
    if KERNEL == GAUSSIAN:
        ratio = tl.minimum(distance * rate, 1e18)
        return ratio * ratio * -0.7213475204444817  # ½ log₂ e
    if KERNEL == INVERSE_MULTIQUADRIC:
        ratio = tl.minimum(distance * rate, 1e18)
        return -0.5 * tl.log2(1.0 + ratio * ratio)
    return distance * (rate * -1.4426950408889634)  # log₂ e


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
    gen, neg, pos, stride, unit, N, M, P, width, least_distance, self_distance,
    WORK: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, MASKED: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Distances as all temperatures see them."""
    dx, du, dp = distances(gen, neg, pos, stride, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    dx = _prepared(dx, least_distance, N, N, BN, BN, RAGGED)
    du = _prepared(du, least_distance, N, M, BN, BM, RAGGED)
    dp = _prepared(dp, least_distance, N, P, BN, BP, RAGGED)
    i = tl.arange(0, BN)
    dx = tl.where(i[:, None] == i[None, :], NOWHERE if MASKED else dx + self_distance * unit, dx)
    return dx, du, dp


@triton.jit
def _row_sum(logits, most, w, WEIGH_KERNEL: tl.constexpr):
    exponent = logits - most[:, None]
    if WEIGH_KERNEL:
        return tl.sum(tl.exp2(tl.minimum(exponent, 0.0)) * w[None, :], axis=1)
    return tl.sum(tl.exp2(exponent), axis=1)


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
    logits = _log2_kernel(distance, rate, KERNEL)
    most = _log2_kernel(nearest, rate, KERNEL)
    if BOTH:
        exponent = (logits - 0.5 * most[:, None]) - 0.5 * _log2_kernel(near, rate, KERNEL)[None, :]
    else:
        exponent = logits - most[:, None]
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
    origin, table, feature_of_vector, weight, sums, V, N, M, P, width, least_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_ij w_j ‖x_i − y_j‖ of each problem."""
    pid, group, _, gen, neg, pos, stride, _ = problem(origin, table, feature_of_vector, V, N, M, P, width)
    dx, du, dp = distances(gen, neg, pos, stride, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    first = group * (N + M + P)
    WEIGH: tl.constexpr = RAGGED or WEIGHTED
    row = _row_distance(dx, least_distance, _weight(weight, first, N, BN, WEIGHTED), WEIGH)
    row += _row_distance(du, least_distance, _weight(weight, first + N, M, BM, WEIGHTED), WEIGH)
    row += _row_distance(dp, least_distance, _weight(weight, first + N + M, P, BP, WEIGHTED), WEIGH)
    tl.store(sums + pid, tl.sum(tl.where(tl.arange(0, BN) < N, row, 0.0), axis=0))


@triton.jit
def _add_product(total, a, y):
    """total + A·y."""
    if y.dtype == tl.float32:
        return tl.dot(a, y, total, input_precision="ieee")
    return tl.dot(a, y, total)


@triton.jit
def _sum_rounded(a):
    return tl.sum(a.to(tl.float32), axis=1)


# What the products leave for the gradient, one row of numbers for each problem: the nearest of all samples of
# each generated one; the nearest generated one of each sample; and for each temperature the factors of the
# rows and columns of A, and the sums of A over what repels and what attracts.


@triton.jit
def _kept_width(R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    return (2 * BN + BM + BP) * (1 + R) + 2 * BN * R


@triton.jit
def _put(pointer, values, B: tl.constexpr):
    tl.store(pointer + tl.arange(0, B), values)
    return pointer + B


@triton.jit
def _get(pointer, B: tl.constexpr):
    return tl.load(pointer + tl.arange(0, B)), pointer + B


@triton.jit(do_not_specialize=["V"])
def products_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, products, kept,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    EQUAL: tl.constexpr, KEEP: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """⟨V_τ, V_τ'⟩ of each problem for τ ≤ τ', ``[problems, R, R]``, in the units of the samples.

    V = a⁺ S⁻ Σ_p A p − a⁻ S⁺ Σ_y⁻ A y⁻ − (a⁺ − a⁻) S⁺ S⁻ x, with S the sums of A as it is rounded.
    """
    pid, group, feature, gen, neg, pos, stride, _ = problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(units + feature)
    dx, du, dp = _pairs(
        gen, neg, pos, stride, unit, N, M, P, width, least_distance, self_distance,
        WORK, RAGGED, DIRECT, MASKED, BN, BM, BP, BK,
    )  # fmt: skip
    first = group * (N + M + P)
    wx = _weight(weight, first, N, BN, WEIGHTED)
    wu = _weight(weight, first + N, M, BM, WEIGHTED)
    wp = _weight(weight, first + N + M, P, BP, WEIGHTED)
    # Distances between generated samples are symmetric: columns are rows.
    near_x, near_u, near_p = tl.min(dx, axis=1), tl.min(du, axis=0), tl.min(dp, axis=0)
    nearest = tl.minimum(_nearest(dx, wx, WEIGH_KERNEL), _nearest(du, wu, WEIGH_KERNEL))
    nearest = _or(tl.minimum(nearest, _nearest(dp, wp, WEIGH_KERNEL)), 0.0)
    near_x, near_u, near_p = _or(near_x, nearest), _or(near_u, 0.0), _or(near_p, 0.0)
    keep = kept + pid * _kept_width(R, BN, BM, BP)
    if KEEP:
        keep = _put(_put(keep, nearest, BN), near_x, BN)
        keep = _put(_put(keep, near_u, BM), near_p, BP)
    by_x, by_u, by_p, repelled, attracted = (), (), (), (), ()
    for r in tl.static_range(R):
        rate = 1.0 / (tl.load(temperatures + r) * unit)
        lx, lu, lp = (
            _log2_kernel(dx, rate, KERNEL),
            _log2_kernel(du, rate, KERNEL),
            _log2_kernel(dp, rate, KERNEL),
        )
        most, high = _log2_kernel(nearest, rate, KERNEL), _log2_kernel(near_x, rate, KERNEL)
        total = _row_sum(lu, most, wu, WEIGH_KERNEL) + _row_sum(lp, most, wp, WEIGH_KERNEL)
        among = tl.sum(tl.exp2(lx - high[:, None]), axis=1)
        if WEIGH_KERNEL:
            total += _row_sum(lx, most, wx, WEIGH_KERNEL)
        else:
            total += among * tl.exp2(high - most)
        by_row = _root(total) if BOTH else 1.0 / tl.maximum(total, 1e-30)
        # Rows that do not exist, and those without any weight to pull, move nothing.
        by_row = tl.where((tl.arange(0, BN) < N) & (total > 1e-30), by_row, 0.0)
        column_x = _root(among)
        column_u = _root(tl.sum(tl.exp2(lu - _log2_kernel(near_u, rate, KERNEL)[None, :]), axis=0))
        column_p = _root(tl.sum(tl.exp2(lp - _log2_kernel(near_p, rate, KERNEL)[None, :]), axis=0))
        ax = _affinity(
            dx,
            nearest,
            by_row,
            near_x,
            column_x,
            wx,
            rate,
            floor,
            KERNEL,
            BOTH,
            WEIGH_KERNEL,
            RAGGED or WEIGHTED,
        )
        au = _affinity(
            du,
            nearest,
            by_row,
            near_u,
            column_u,
            wu,
            rate,
            floor,
            KERNEL,
            BOTH,
            WEIGH_KERNEL,
            RAGGED or WEIGHTED,
        )
        ap = _affinity(
            dp,
            nearest,
            by_row,
            near_p,
            column_p,
            wp,
            rate,
            floor,
            KERNEL,
            BOTH,
            WEIGH_KERNEL,
            RAGGED or WEIGHTED,
        )
        if KEEP:
            keep = _put(_put(keep, by_row, BN), column_x, BN)
            keep = _put(_put(keep, column_u, BM), column_p, BP)
            keep = _put(_put(keep, tl.sum(ax, axis=1) + tl.sum(au, axis=1), BN), tl.sum(ap, axis=1), BN)
        ax, au, ap = ax.to(WORK), au.to(WORK), ap.to(WORK)
        by_x, by_u, by_p = by_x + (ax,), by_u + (au,), by_p + (ap,)
        repelled, attracted = (
            repelled + (_sum_rounded(ax) + _sum_rounded(au),),
            attracted + (_sum_rounded(ap),),
        )
    sums = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        sums = sums + (tl.zeros((BN,), tl.float32),)
    for k in range(0, width, BK):
        x, u, p = tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drifts = ()
        for r in tl.static_range(R):
            away = _add_product(_add_product(tl.zeros((BN, BK), tl.float32), by_x[r], x), by_u[r], u)
            near = _add_product(tl.zeros((BN, BK), tl.float32), by_p[r], p)
            drift = (attraction * repelled[r])[:, None] * near - (repulsion * attracted[r])[:, None] * away
            if not EQUAL:
                both = (attraction - repulsion) * repelled[r] * attracted[r]
                drift -= both[:, None] * x.to(tl.float32)
            drifts = drifts + (drift,)
        found = ()
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                found = found + (sums[r * R - r * (r + 1) // 2 + s] + tl.sum(drifts[r] * drifts[s], axis=1),)
        sums = found
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            total = tl.sum(tl.where(tl.arange(0, BN) < N, sums[r * R - r * (r + 1) // 2 + s], 0.0), axis=0)
            tl.store(products + (pid * R + r) * R + s, total)


@triton.jit(do_not_specialize=["V"])
def gradient_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, kept, inverse_norms, factors, upstream,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """upstream · factor · Σ_τ V_τ / λ_τ, into the gradient of each generated sample.

    V_i = Σ_j C_ij (y_j − x_i) with C = −a⁻ S⁺ A, or a⁺ S⁻ A where y attracts.
    """
    pid, group, feature, gen, neg, pos, stride, start = problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(units + feature)
    dx, du, dp = _pairs(
        gen, neg, pos, stride, unit, N, M, P, width, least_distance, self_distance,
        WORK, RAGGED, DIRECT, MASKED, BN, BM, BP, BK,
    )  # fmt: skip
    first = group * (N + M + P)
    wx = _weight(weight, first, N, BN, WEIGHTED)
    wu = _weight(weight, first + N, M, BM, WEIGHTED)
    wp = _weight(weight, first + N + M, P, BP, WEIGHTED)
    keep = kept + pid * _kept_width(R, BN, BM, BP)
    nearest, keep = _get(keep, BN)
    near_x, keep = _get(keep, BN)
    near_u, keep = _get(keep, BM)
    near_p, keep = _get(keep, BP)
    cx, cu, cp = (
        tl.zeros((BN, BN), tl.float32),
        tl.zeros((BN, BM), tl.float32),
        tl.zeros((BN, BP), tl.float32),
    )
    for r in tl.static_range(R):
        rate = 1.0 / (tl.load(temperatures + r) * unit)
        by_row, keep = _get(keep, BN)
        column_x, keep = _get(keep, BN)
        column_u, keep = _get(keep, BM)
        column_p, keep = _get(keep, BP)
        repelled, keep = _get(keep, BN)
        attracted, keep = _get(keep, BN)
        share = tl.load(inverse_norms + feature * R + r)
        back, forth = (-repulsion * share) * attracted, (attraction * share) * repelled
        back, forth = tl.where(by_row > 0, back, 0.0)[:, None], tl.where(by_row > 0, forth, 0.0)[:, None]
        cx += back * _affinity(
            dx,
            nearest,
            by_row,
            near_x,
            column_x,
            wx,
            rate,
            floor,
            KERNEL,
            BOTH,
            WEIGH_KERNEL,
            RAGGED or WEIGHTED,
        )
        cu += back * _affinity(
            du,
            nearest,
            by_row,
            near_u,
            column_u,
            wu,
            rate,
            floor,
            KERNEL,
            BOTH,
            WEIGH_KERNEL,
            RAGGED or WEIGHTED,
        )
        cp += forth * _affinity(
            dp,
            nearest,
            by_row,
            near_p,
            column_p,
            wp,
            rate,
            floor,
            KERNEL,
            BOTH,
            WEIGH_KERNEL,
            RAGGED or WEIGHTED,
        )
    hx, hu, hp = cx.to(WORK), cu.to(WORK), cp.to(WORK)
    total = _sum_rounded(hx) + _sum_rounded(hu) + _sum_rounded(hp)
    if tl.float32 != WORK:
        lx, lu, lp = (
            (cx - hx.to(tl.float32)).to(WORK),
            (cu - hu.to(tl.float32)).to(WORK),
            (cp - hp.to(tl.float32)).to(WORK),
        )
        total += _sum_rounded(lx) + _sum_rounded(lu) + _sum_rounded(lp)
    factor = tl.load(factors + feature) * tl.load(upstream + group)
    out = address(origin, table, feature, GRADIENT) + start
    row = tl.arange(0, BN)
    for k in range(0, width, BK):
        x, u, p = tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drift = _add_product(tl.zeros((BN, BK), tl.float32), hx, x)
        drift = _add_product(_add_product(drift, hu, u), hp, p)
        if tl.float32 != WORK:
            drift = _add_product(_add_product(_add_product(drift, lx, x), lu, u), lp, p)
        drift = factor * (drift - total[:, None] * x.to(tl.float32))
        column = k + tl.arange(0, BK)
        inside = (row < N)[:, None] & (column < width)[None, :]
        tl.store(out + row[:, None] * stride + column[None, :], drift.to(out.dtype.element_ty), mask=inside)
