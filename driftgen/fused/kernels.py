"""The loss as three GPU kernels, one program for each problem: sum of distances, products of drifts,
gradient.

A problem is the N generated samples x of one group and vector, with its M unconditional negatives u and P
positives p. Everything between the samples and the result stays on the chip: distances, affinities and
coefficients of a problem are never written to memory. Sums over problems are left to the caller, so that
results do not depend on the order in which programs end.

Three things make the arithmetic hold. Squared distances come from products on the tensor cores, |x|² + |y|² −
2xy, in coordinates whose common part was taken away; and |y|² is read from the same products, so that equal
samples have distance 0 exactly. Narrow vectors and float32 take differences instead. The drift Σ_j C_ij (y_j
− x_i) takes away x_i times the sum of the C_ij as they were rounded, so that rounding costs digits of the
differences only. And the gradient takes each C_ij in two halves, the second one being what rounding took from
the first.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gradient_kernel", "products_kernel", "scale_kernel"]

# Columns of the table that describes the features of a bucket.
GENERATED = tl.constexpr(0)
NEGATIVES = tl.constexpr(1)
POSITIVES = tl.constexpr(2)
GRADIENT = tl.constexpr(3)
VECTORS = tl.constexpr(4)
FIRST = tl.constexpr(5)
APART = tl.constexpr(6)  # vectors from group to group of the generated samples, negatives and positives
FIELDS = tl.constexpr(9)
LAPLACE = tl.constexpr(0)
GAUSSIAN = tl.constexpr(1)
INVERSE_MULTIQUADRIC = tl.constexpr(2)
FARTHEST = tl.constexpr(3.0e38)
NEVER = tl.constexpr(-1.0e37)  # the logit of a pair that does not exist
# Beware of constants below 1.2e-38: they would make everything they touch float64.


@triton.jit
def _address(origin, table, feature, column: tl.constexpr):
    """Where the samples of a feature begin: so many numbers after ``origin``, a multiple of 16 bytes."""
    away = tl.load(table + feature * FIELDS + column)
    return origin + tl.multiple_of(away, 128 // origin.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _samples(origin, table, feature, column: tl.constexpr, group, vector, width):
    """The first number of a problem in one of the sets."""
    apart = tl.load(table + feature * FIELDS + APART + column)
    return _address(origin, table, feature, column) + (group * apart + vector) * width


@triton.jit
def _tile(pointer, stride, samples, width, k, B: tl.constexpr, BK: tl.constexpr):
    """Numbers k ... k + BK of each sample, ``[B, BK]``, zero outside."""
    row, column = tl.arange(0, B), k + tl.arange(0, BK)
    inside = (row < samples)[:, None] & (column < width)[None, :]
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _part(pointer, stride, sample, width, k, BK: tl.constexpr):
    column = k + tl.arange(0, BK)
    return tl.load(pointer + sample * stride + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _middle(gen, pos, stride, N, P, width, k, BK: tl.constexpr):
    """A point amid the samples, ``[BK]``: the median of three, which one outlier cannot move."""
    a = _part(gen, stride, 0, width, k, BK)
    b = _part(gen, stride, N // 2, width, k, BK)
    c = _part(pos, stride, P - 1, width, k, BK)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _farthest(tile, centre, samples, B: tl.constexpr):
    """The largest difference to the centre in each coordinate."""
    inside = (tl.arange(0, B) < samples)[:, None]
    return tl.max(tl.where(inside, tl.abs(tile.to(tl.float32) - centre[None, :]), 0.0), axis=0)


@triton.jit
def _centre(centres, pid, gen, pos, stride, N, P, width, k, DIRECT: tl.constexpr, BK: tl.constexpr):
    """What is taken away from all samples before products, ``[BK]``.

    For products of 16-bit numbers it is the one that the first pass has stored: it leaves no difference that
    needs more digits than the samples have.
    """
    if DIRECT:
        return _middle(gen, pos, stride, N, P, width, k, BK)
    column = k + tl.arange(0, BK)
    return tl.load(centres + pid * width + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def _centred(tile, centre, samples, B: tl.constexpr, WORK: tl.constexpr):
    inside = (tl.arange(0, B) < samples)[:, None]
    return tl.where(inside, tile.to(tl.float32) - centre[None, :], 0.0).to(WORK)


@triton.jit
def _diagonal(product, axis: tl.constexpr, B: tl.constexpr):
    i = tl.arange(0, B)
    return tl.sum(tl.where(i[:, None] == i[None, :], product, 0.0), axis=axis)


@triton.jit
def _from_products(product, square_x, square_y):
    return tl.sqrt(tl.minimum(tl.maximum(square_x[:, None] + square_y[None, :] - 2 * product, 0.0), FARTHEST))


@triton.jit
def _distances(
    centres, pid, gen, neg, pos, stride, N, M, P, width,
    FIRST_PASS: tl.constexpr, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """‖x − y‖ for y = x, u and p: ``[BN, BN]``, ``[BN, BM]``, ``[BN, BP]``."""
    xx = tl.zeros((BN, BN), tl.float32)
    xu = tl.zeros((BN, BM), tl.float32)
    xp = tl.zeros((BN, BP), tl.float32)
    if DIRECT:
        rn, rm, rp = tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BP)
        for k in range(width):
            x = tl.load(gen + rn * stride + k, mask=rn < N, other=0.0).to(tl.float32)
            u = tl.load(neg + rm * stride + k, mask=rm < M, other=0.0).to(tl.float32)
            p = tl.load(pos + rp * stride + k, mask=rp < P, other=0.0).to(tl.float32)
            by_x, by_u, by_p = x[:, None] - x[None, :], x[:, None] - u[None, :], x[:, None] - p[None, :]
            xx += by_x * by_x
            xu += by_u * by_u
            xp += by_p * by_p
        return (
            tl.sqrt(tl.minimum(xx, FARTHEST)),
            tl.sqrt(tl.minimum(xu, FARTHEST)),
            tl.sqrt(tl.minimum(xp, FARTHEST)),
        )
    uu = tl.zeros((BM, BM), tl.float32)
    pp = tl.zeros((BP, BP), tl.float32)
    for k in range(0, width, BK):
        x = _tile(gen, stride, N, width, k, BN, BK)
        u = _tile(neg, stride, M, width, k, BM, BK)
        p = _tile(pos, stride, P, width, k, BP, BK)
        if FIRST_PASS:
            centre = _middle(gen, pos, stride, N, P, width, k, BK)
            far = tl.maximum(_farthest(x, centre, N, BN), _farthest(u, centre, M, BM))
            far = tl.maximum(far, _farthest(p, centre, P, BP))
            # Between half of a number and its double, differences to it are exact (Sterbenz).
            centre = tl.where(2 * far <= tl.abs(centre), centre, 0.0)
            column = k + tl.arange(0, BK)
            tl.store(centres + pid * width + column, centre.to(WORK), mask=column < width)
        else:
            centre = _centre(centres, pid, gen, pos, stride, N, P, width, k, False, BK)
        x = _centred(x, centre, N, BN, WORK)
        u = _centred(u, centre, M, BM, WORK)
        p = _centred(p, centre, P, BP, WORK)
        xx, xu, xp = tl.dot(x, tl.trans(x), xx), tl.dot(x, tl.trans(u), xu), tl.dot(x, tl.trans(p), xp)
        uu, pp = tl.dot(u, tl.trans(u), uu), tl.dot(p, tl.trans(p), pp)
    square = _diagonal(xx, 1, BN)
    return (
        _from_products(xx, square, _diagonal(xx, 0, BN)),
        _from_products(xu, square, _diagonal(uu, 0, BM)),
        _from_products(xp, square, _diagonal(pp, 0, BP)),
    )


@triton.jit
def _inside(N, K, BN: tl.constexpr, B: tl.constexpr):
    return (tl.arange(0, BN) < N)[:, None] & (tl.arange(0, B) < K)[None, :]


@triton.jit
def _weight(weight, start, K, B: tl.constexpr, WEIGHTED: tl.constexpr):
    """w of the K samples that begin at ``start``, ``[B]``, zero outside."""
    i = tl.arange(0, B)
    if WEIGHTED:
        return tl.load(weight + start + i, mask=i < K, other=0.0)
    return tl.where(i < K, 1.0, 0.0)


@triton.jit
def _logits(distance, temperature, KERNEL: tl.constexpr):
    """log k; see ``driftgen.kernels``."""
    ratio = distance / temperature
    if KERNEL == GAUSSIAN:
        ratio = tl.minimum(ratio, 1e18)
        return -0.5 * ratio * ratio
    if KERNEL == INVERSE_MULTIQUADRIC:
        ratio = tl.minimum(ratio, 1e18)
        return -0.5 * tl.log(1.0 + ratio * ratio)
    return -ratio


@triton.jit
def _column_log_sum(logits, inside):
    """log Σ_x k of each y. Nothing is inside where it stands for no sample: any number will do there."""
    most = tl.max(tl.where(inside, logits, NEVER), axis=0)
    return most + tl.log(
        tl.maximum(tl.sum(tl.exp(tl.where(inside, logits - most[None, :], NEVER)), axis=0), 1e-37)
    )


@triton.jit
def _row_most(logits, inside):
    return tl.max(tl.where(inside, logits, NEVER), axis=1)


@triton.jit
def _row_sum(logits, most, inside, w, WEIGH_KERNEL: tl.constexpr):
    terms = tl.exp(tl.where(inside, logits - most[:, None], NEVER))
    if WEIGH_KERNEL:
        terms *= w[None, :]
    return tl.sum(terms, axis=1)


@triton.jit
def _affinity(logits, by_row, by_column, inside, w, floor, BOTH: tl.constexpr):
    """A, with the floor of the release, times the weights; 0 outside."""
    exponent = logits - 0.5 * (by_row[:, None] + by_column[None, :]) if BOTH else logits - by_row[:, None]
    # Only what has no weight can lie so high above the sum.
    a = tl.maximum(tl.exp(tl.minimum(exponent, 80.0)), floor)
    return tl.where(inside, a * w[None, :], 0.0)


@triton.jit
def _coefficients(
    dx, du, dp, wx, wu, wp, N, M, P, temperature, unit, self_distance, floor, attraction, repulsion,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """C with V_i = Σ_j C_ij (y_j − x_i), in three parts."""
    i = tl.arange(0, BN)
    itself = i[:, None] == i[None, :]
    in_x, in_u, in_p = _inside(N, N, BN, BN), _inside(N, M, BN, BM), _inside(N, P, BN, BP)
    nearness = dx / unit
    if MASKED:
        in_x &= ~itself
    else:
        nearness = tl.where(itself, nearness + self_distance, nearness)
    lx = _logits(nearness, temperature, KERNEL)
    lu = _logits(du / unit, temperature, KERNEL)
    lp = _logits(dp / unit, temperature, KERNEL)
    # Sums over y: what has no weight takes no part in them where weights count copies.
    sx, su, sp = in_x, in_u, in_p
    if WEIGH_KERNEL:
        sx, su, sp = sx & (wx > 0)[None, :], su & (wu > 0)[None, :], sp & (wp > 0)[None, :]
    most = tl.maximum(_row_most(lx, sx), tl.maximum(_row_most(lu, su), _row_most(lp, sp)))
    total = _row_sum(lx, most, sx, wx, WEIGH_KERNEL)
    total += _row_sum(lu, most, su, wu, WEIGH_KERNEL)
    total += _row_sum(lp, most, sp, wp, WEIGH_KERNEL)
    by_row = most + tl.log(tl.maximum(total, 1e-37))
    # A row without any weight pulls nowhere.
    something = (total > 0)[:, None]
    ax = _affinity(lx, by_row, _column_log_sum(lx, in_x), in_x & something, wx, floor, BOTH)
    au = _affinity(lu, by_row, _column_log_sum(lu, in_u), in_u & something, wu, floor, BOTH)
    ap = _affinity(lp, by_row, _column_log_sum(lp, in_p), in_p & something, wp, floor, BOTH)
    repelled, attracted = tl.sum(ax, axis=1) + tl.sum(au, axis=1), tl.sum(ap, axis=1)
    back, forth = -repulsion * attracted[:, None], attraction * repelled[:, None]
    return ax * back, au * back, ap * forth


@triton.jit
def _problem(origin, table, feature_of_vector, V, N, M, P, width):
    """Where this program's problem lies: group, feature, its first number in the three sets, how far apart
    its samples are, and how far its first number is from that of the feature.
    """
    pid = tl.program_id(0).to(tl.int64)
    group, vector = pid // V, pid % V
    feature = tl.load(feature_of_vector + vector)
    vectors = tl.load(table + feature * FIELDS + VECTORS)
    own = vector - tl.load(table + feature * FIELDS + FIRST)
    gen = _samples(origin, table, feature, GENERATED, group, own, width)
    neg = _samples(origin, table, feature, NEGATIVES, group, own, width)
    pos = _samples(origin, table, feature, POSITIVES, group, own, width)
    start = (group * N * vectors + own) * width
    return pid, group, feature, gen, neg, pos, vectors.to(tl.int32) * width, start


@triton.jit
def scale_kernel(
    origin, table, feature_of_vector, weight, centres, sums, V, N, M, P, width, least_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_ij w_j ‖x_i − y_j‖ of each problem."""
    pid, group, _, gen, neg, pos, stride, _ = _problem(origin, table, feature_of_vector, V, N, M, P, width)
    dx, du, dp = _distances(
        centres, pid, gen, neg, pos, stride, N, M, P, width, True, DIRECT, WORK, BN, BM, BP, BK
    )
    first = group * (N + M + P)
    wx = _weight(weight, first, N, BN, WEIGHTED)
    wu = _weight(weight, first + N, M, BM, WEIGHTED)
    wp = _weight(weight, first + N + M, P, BP, WEIGHTED)
    row = tl.sum(tl.where(_inside(N, N, BN, BN), tl.maximum(dx, least_distance) * wx[None, :], 0.0), axis=1)
    row += tl.sum(tl.where(_inside(N, M, BN, BM), tl.maximum(du, least_distance) * wu[None, :], 0.0), axis=1)
    row += tl.sum(tl.where(_inside(N, P, BN, BP), tl.maximum(dp, least_distance) * wp[None, :], 0.0), axis=1)
    tl.store(sums + pid, tl.sum(row, axis=0))


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


@triton.jit
def products_kernel(
    origin, table, feature_of_vector, weight, centres, units, temperatures, products,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """⟨V_τ, V_τ'⟩ of each problem for τ ≤ τ', ``[problems, R, R]``, in the units of the samples."""
    pid, group, feature, gen, neg, pos, stride, _ = _problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    dx, du, dp = _distances(
        centres, pid, gen, neg, pos, stride, N, M, P, width, False, DIRECT, WORK, BN, BM, BP, BK
    )
    dx, du, dp = (
        tl.maximum(dx, least_distance),
        tl.maximum(du, least_distance),
        tl.maximum(dp, least_distance),
    )
    first = group * (N + M + P)
    wx = _weight(weight, first, N, BN, WEIGHTED)
    wu = _weight(weight, first + N, M, BM, WEIGHTED)
    wp = _weight(weight, first + N + M, P, BP, WEIGHTED)
    unit = tl.load(units + feature)
    by_x, by_u, by_p, totals = (), (), (), ()
    for r in tl.static_range(R):
        cx, cu, cp = _coefficients(
            dx, du, dp, wx, wu, wp, N, M, P, tl.load(temperatures + r), unit, self_distance, floor,
            attraction, repulsion, KERNEL, BOTH, MASKED, WEIGH_KERNEL, BN, BM, BP,
        )  # fmt: skip
        cx, cu, cp = cx.to(WORK), cu.to(WORK), cp.to(WORK)
        by_x, by_u, by_p = by_x + (cx,), by_u + (cu,), by_p + (cp,)
        totals = totals + (_row_total(cx, cu, cp),)
    sums = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        sums = sums + (tl.zeros((BN,), tl.float32),)
    for k in range(0, width, BK):
        centre = _centre(centres, pid, gen, pos, stride, N, P, width, k, DIRECT, BK)
        x = _centred(_tile(gen, stride, N, width, k, BN, BK), centre, N, BN, WORK)
        u = _centred(_tile(neg, stride, M, width, k, BM, BK), centre, M, BM, WORK)
        p = _centred(_tile(pos, stride, P, width, k, BP, BK), centre, P, BP, WORK)
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


@triton.jit
def gradient_kernel(
    origin, table, feature_of_vector, weight, centres, units, temperatures, inverse_norms, factors, upstream,
    V, N, M, P, width, least_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGH_KERNEL: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """upstream · factor · Σ_τ V_τ / λ_τ, into the gradient of each generated sample."""
    pid, group, feature, gen, neg, pos, stride, start = _problem(
        origin, table, feature_of_vector, V, N, M, P, width
    )
    dx, du, dp = _distances(
        centres, pid, gen, neg, pos, stride, N, M, P, width, False, DIRECT, WORK, BN, BM, BP, BK
    )
    dx, du, dp = (
        tl.maximum(dx, least_distance),
        tl.maximum(du, least_distance),
        tl.maximum(dp, least_distance),
    )
    first = group * (N + M + P)
    wx = _weight(weight, first, N, BN, WEIGHTED)
    wu = _weight(weight, first + N, M, BM, WEIGHTED)
    wp = _weight(weight, first + N + M, P, BP, WEIGHTED)
    unit = tl.load(units + feature)
    cx, cu, cp = (
        tl.zeros((BN, BN), tl.float32),
        tl.zeros((BN, BM), tl.float32),
        tl.zeros((BN, BP), tl.float32),
    )
    for r in tl.static_range(R):
        ax, au, ap = _coefficients(
            dx, du, dp, wx, wu, wp, N, M, P, tl.load(temperatures + r), unit, self_distance, floor,
            attraction, repulsion, KERNEL, BOTH, MASKED, WEIGH_KERNEL, BN, BM, BP,
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
    out = _address(origin, table, feature, GRADIENT) + start
    row = tl.arange(0, BN)
    for k in range(0, width, BK):
        centre = _centre(centres, pid, gen, pos, stride, N, P, width, k, DIRECT, BK)
        x = _centred(_tile(gen, stride, N, width, k, BN, BK), centre, N, BN, WORK)
        u = _centred(_tile(neg, stride, M, width, k, BM, BK), centre, M, BM, WORK)
        p = _centred(_tile(pos, stride, P, width, k, BP, BK), centre, P, BP, WORK)
        drift = _drift(hx, hu, hp, x, u, p, BN, BK)
        if tl.float32 != WORK:
            drift += _drift(lx, lu, lp, x, u, p, BN, BK)
        drift = factor * (drift - total[:, None] * x.to(tl.float32))
        column = k + tl.arange(0, BK)
        inside = (row < N)[:, None] & (column < width)[None, :]
        tl.store(out + row[:, None] * stride + column[None, :], drift.to(out.dtype.element_ty), mask=inside)
