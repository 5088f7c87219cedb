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
def _row_sum(logits, most, w, WEIGH_KERNEL: tl.constexpr):
    exponent = logits - most[:, None]
    if WEIGH_KERNEL:
        return tl.sum(tl.exp2(tl.minimum(exponent, 0.0)) * w[None, :], axis=1)
    return tl.sum(tl.exp2(exponent), axis=1)


@triton.jit
def _affinity(
    logits, most, row_factor, least, w, rate, floor,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
):  # fmt: skip
    """A, with the floor of the release, times the weights, which are 0 for what does not exist.

    √(softmax_y · softmax_x) = 2^(l − ½ max_y l − ½ max_x l) / √(Σ_y · Σ_x): no exponent above 0, no sum below
    1, and no logarithm, which takes 25 instructions.
    """
    if BOTH:
        highest = _log2_kernel(least, rate, KERNEL)
        column_factor = tl.rsqrt(tl.sum(tl.exp2(logits - highest[None, :]), axis=0))
        exponent = logits - 0.5 * most[:, None] - 0.5 * highest[None, :]
    else:
        exponent = logits - most[:, None]
    if WEIGH_KERNEL:
        exponent = tl.minimum(exponent, 60.0)  # only what has no weight can lie so high above the others
    a = tl.exp2(exponent) * row_factor[:, None]
    if BOTH:
        a *= column_factor[None, :]
    return tl.maximum(a, floor) * w[None, :]


@triton.jit
def _prepared(distance, least_distance, inside):
    """The distance to what does not exist is beyond all others."""
    return tl.where(inside, tl.maximum(distance, least_distance), NOWHERE)


@triton.jit
def _nearest(distance, w, WEIGH_KERNEL: tl.constexpr):
    """The least distance in each row; what has no weight does not count where weights count copies."""
    if WEIGH_KERNEL:
        distance = tl.where((w > 0)[None, :], distance, NOWHERE)
    return tl.min(distance, axis=1)


@triton.jit
def _pairs(
    gen, neg, pos, stride, weight, group, unit, N, M, P, width, least_distance, self_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr, MASKED: tl.constexpr,
    WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """What all temperatures share: distances, weights, and the least distance of each row and column."""
    dx, du, dp = distances(gen, neg, pos, stride, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    dx = _prepared(dx, least_distance, inside_of(N, N, BN, BN))
    du = _prepared(du, least_distance, inside_of(N, M, BN, BM))
    dp = _prepared(dp, least_distance, inside_of(N, P, BN, BP))
    i = tl.arange(0, BN)
    dx = tl.where(i[:, None] == i[None, :], NOWHERE if MASKED else dx + self_distance * unit, dx)
    first = group * (N + M + P)
    wx = _weight(weight, first, N, BN, WEIGHTED)
    wu = _weight(weight, first + N, M, BM, WEIGHTED)
    wp = _weight(weight, first + N + M, P, BP, WEIGHTED)
    nearest = tl.minimum(_nearest(dx, wx, WEIGH_KERNEL), _nearest(du, wu, WEIGH_KERNEL))
    nearest = tl.minimum(nearest, _nearest(dp, wp, WEIGH_KERNEL))
    return dx, du, dp, wx, wu, wp, nearest, tl.min(dx, axis=0), tl.min(du, axis=0), tl.min(dp, axis=0)


@triton.jit
def _coefficients(
    pairs, N, temperature, unit, floor, attraction, repulsion,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, WEIGH_KERNEL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """C with V_i = Σ_j C_ij (y_j − x_i), in three parts."""
    dx, du, dp, wx, wu, wp, nearest, near_x, near_u, near_p = pairs
    rate = 1.0 / (temperature * unit)
    lx, lu, lp = (
        _log2_kernel(dx, rate, KERNEL),
        _log2_kernel(du, rate, KERNEL),
        _log2_kernel(dp, rate, KERNEL),
    )
    most = _log2_kernel(nearest, rate, KERNEL)
    total = _row_sum(lx, most, wx, WEIGH_KERNEL) + _row_sum(lu, most, wu, WEIGH_KERNEL)
    total += _row_sum(lp, most, wp, WEIGH_KERNEL)
    total = tl.maximum(total, 1e-30)
    by_row = tl.rsqrt(total) if BOTH else 1.0 / total
    ax = _affinity(lx, most, by_row, near_x, wx, rate, floor, KERNEL, BOTH, WEIGH_KERNEL)
    au = _affinity(lu, most, by_row, near_u, wu, rate, floor, KERNEL, BOTH, WEIGH_KERNEL)
    ap = _affinity(lp, most, by_row, near_p, wp, rate, floor, KERNEL, BOTH, WEIGH_KERNEL)
    repelled, attracted = tl.sum(ax, axis=1) + tl.sum(au, axis=1), tl.sum(ap, axis=1)
    # Rows that do not exist, and those without any weight to pull, move nothing.
    real = (tl.arange(0, BN) < N) & (total > 1e-30)
    back = tl.where(real, -repulsion * attracted, 0.0)[:, None]
    forth = tl.where(real, attraction * repelled, 0.0)[:, None]
    return ax * back, au * back, ap * forth


@triton.jit(do_not_specialize=["V"])
def scale_kernel(
    origin, table, feature_of_vector, weight, sums, V, N, M, P, width, least_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_ij w_j ‖x_i − y_j‖ of each problem."""
    pid, group, _, gen, neg, pos, stride, _ = problem(origin, table, feature_of_vector, V, N, M, P, width)
    dx, du, dp = distances(gen, neg, pos, stride, N, M, P, width, DIRECT, WORK, BN, BM, BP, BK)
    first = group * (N + M + P)
    row = tl.sum(tl.maximum(dx, least_distance) * _weight(weight, first, N, BN, WEIGHTED)[None, :], axis=1)
    row += tl.sum(
        tl.maximum(du, least_distance) * _weight(weight, first + N, M, BM, WEIGHTED)[None, :], axis=1
    )
    row += tl.sum(
        tl.maximum(dp, least_distance) * _weight(weight, first + N + M, P, BP, WEIGHTED)[None, :], axis=1
    )
    tl.store(sums + pid, tl.sum(tl.where(tl.arange(0, BN) < N, row, 0.0), axis=0))


@triton.jit
def _add_product(total, coefficients, y):
    """total + C·y."""
    if y.dtype == tl.float32:
        return tl.dot(coefficients, y, total, input_precision="ieee")
    return tl.dot(coefficients, y, total)


@triton.jit
def _drift(cx, cu, cp, x, u, p, BN: tl.constexpr, BK: tl.constexpr):
    """Σ_j C_ij y_j."""
    moved = _add_product(tl.zeros((BN, BK), tl.float32), cx, x)
    return _add_product(_add_product(moved, cu, u), cp, p)


@triton.jit
def _row_total(cx, cu, cp):
    total = tl.sum(cx.to(tl.float32), axis=1) + tl.sum(cu.to(tl.float32), axis=1)
    return total + tl.sum(cp.to(tl.float32), axis=1)


@triton.jit(do_not_specialize=["V"])
def products_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, products,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """⟨V_τ, V_τ'⟩ of each problem for τ ≤ τ', ``[problems, R, R]``, in the units of the samples."""
    pid, group, feature, gen, neg, pos, stride, _ = problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(units + feature)
    pairs = _pairs(
        gen, neg, pos, stride, weight, group, unit, N, M, P, width, least_distance, self_distance,
        WORK, WEIGHTED, DIRECT, MASKED, WEIGH_KERNEL, BN, BM, BP, BK,
    )  # fmt: skip
    by_x, by_u, by_p, totals = (), (), (), ()
    for r in tl.static_range(R):
        cx, cu, cp = _coefficients(
            pairs, N, tl.load(temperatures + r), unit, floor, attraction, repulsion,
            KERNEL, BOTH, WEIGH_KERNEL, BN,
        )  # fmt: skip
        cx, cu, cp = cx.to(WORK), cu.to(WORK), cp.to(WORK)
        by_x, by_u, by_p = by_x + (cx,), by_u + (cu,), by_p + (cp,)
        totals = totals + (_row_total(cx, cu, cp),)
    sums = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        sums = sums + (tl.zeros((BN,), tl.float32),)
    for k in range(0, width, BK):
        x, u, p = tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drifts = ()
        for r in tl.static_range(R):
            drift = _drift(by_x[r], by_u[r], by_p[r], x, u, p, BN, BK)
            drifts = drifts + (drift - totals[r][:, None] * x.to(tl.float32),)
        found = ()
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                found = found + (sums[r * R - r * (r + 1) // 2 + s] + tl.sum(drifts[r] * drifts[s], axis=1),)
        sums = found
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            tl.store(products + (pid * R + r) * R + s, tl.sum(sums[r * R - r * (r + 1) // 2 + s], axis=0))


@triton.jit(do_not_specialize=["V"])
def gradient_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, inverse_norms, factors, upstream,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """upstream · factor · Σ_τ V_τ / λ_τ, into the gradient of each generated sample."""
    _, group, feature, gen, neg, pos, stride, start = problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    unit = tl.load(units + feature)
    pairs = _pairs(
        gen, neg, pos, stride, weight, group, unit, N, M, P, width, least_distance, self_distance,
        WORK, WEIGHTED, DIRECT, MASKED, WEIGH_KERNEL, BN, BM, BP, BK,
    )  # fmt: skip
    cx, cu, cp = (
        tl.zeros((BN, BN), tl.float32),
        tl.zeros((BN, BM), tl.float32),
        tl.zeros((BN, BP), tl.float32),
    )
    for r in tl.static_range(R):
        ax, au, ap = _coefficients(
            pairs, N, tl.load(temperatures + r), unit, floor, attraction, repulsion,
            KERNEL, BOTH, WEIGH_KERNEL, BN,
        )  # fmt: skip
        share = tl.load(inverse_norms + feature * R + r)
        cx, cu, cp = cx + share * ax, cu + share * au, cp + share * ap
    hx, hu, hp = cx.to(WORK), cu.to(WORK), cp.to(WORK)
    total = _row_total(hx, hu, hp)
    if tl.float32 != WORK:
        lx, lu, lp = (
            (cx - hx.to(tl.float32)).to(WORK),
            (cu - hu.to(tl.float32)).to(WORK),
            (cp - hp.to(tl.float32)).to(WORK),
        )
        total += _row_total(lx, lu, lp)
    factor = tl.load(factors + feature) * tl.load(upstream + group)
    out = address(origin, table, feature, GRADIENT) + start
    row = tl.arange(0, BN)
    for k in range(0, width, BK):
        x, u, p = tiles(gen, neg, pos, stride, N, M, P, width, k, DIRECT, WORK, BN, BM, BP, BK)
        drift = _drift(hx, hu, hp, x, u, p, BN, BK)
        if tl.float32 != WORK:
            drift += _drift(lx, lu, lp, x, u, p, BN, BK)
        drift = factor * (drift - total[:, None] * x.to(tl.float32))
        column = k + tl.arange(0, BK)
        inside = (row < N)[:, None] & (column < width)[None, :]
        tl.store(out + row[:, None] * stride + column[None, :], drift.to(out.dtype.element_ty), mask=inside)
