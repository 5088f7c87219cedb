"""Where the samples of a problem lie, and how far apart they are: the part that all kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "APART",
    "FIELDS",
    "FIRST",
    "GENERATED",
    "GRADIENT",
    "NEGATIVES",
    "POSITION",
    "POSITIVES",
    "VECTORS",
    "address",
    "distances",
    "first_distances",
    "inside_of",
    "left_width",
    "problem",
    "tiles",
]

# Columns of the table that describes the features of a bucket.
GENERATED = tl.constexpr(0)
NEGATIVES = tl.constexpr(1)
POSITIVES = tl.constexpr(2)
GRADIENT = tl.constexpr(3)
VECTORS = tl.constexpr(4)
FIRST = tl.constexpr(5)
APART = tl.constexpr(6)  # vectors from group to group of the generated samples, negatives and positives
POSITION = tl.constexpr(9)  # of the feature in the call
FIELDS = tl.constexpr(10)
FARTHEST = tl.constexpr(3.0e38)
CLOSE = tl.constexpr(1 / 64)  # mean squared distance to mean squared norms, below which digits would cancel


@triton.jit
def address(origin, table, feature, column: tl.constexpr):
    """Where the samples of a feature begin: so many numbers after ``origin``, a multiple of 16 bytes."""
    away = tl.load(table + feature * FIELDS + column)
    return origin + tl.multiple_of(away, 128 // origin.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _samples(origin, table, feature, column: tl.constexpr, group, vector, width):
    """The first number of a problem in one of the sets."""
    apart = tl.load(table + feature * FIELDS + APART + column)
    return address(origin, table, feature, column) + (group * apart + vector) * width


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
def _centred(tile, centre, samples, B: tl.constexpr, WORK: tl.constexpr):
    inside = (tl.arange(0, B) < samples)[:, None]
    return tl.where(inside, tile.to(tl.float32) - centre[None, :], 0.0).to(WORK)


@triton.jit
def _norms(product, B: tl.constexpr):
    i = tl.arange(0, B)
    return tl.sum(tl.where(i[:, None] == i[None, :], product, 0.0), axis=1)


@triton.jit
def _squares(product, square_x, square_y):
    # A negative one is as far from the truth as its absolute value, which costs nothing.
    return tl.minimum(tl.abs(square_x[:, None] + square_y[None, :] - 2 * product), FARTHEST)


@triton.jit
def _three(xx, xu, xp, norm_x, norm_u, norm_p):
    return _squares(xx, norm_x, norm_x), _squares(xu, norm_x, norm_u), _squares(xp, norm_x, norm_p)


@triton.jit
def _is_close(squares, norms_x, norms_y, N, K, BN: tl.constexpr, B: tl.constexpr):
    """Whether Σ |x − y|² is small beside Σ |x|² + |y|²; what does not exist has the norm 0."""
    x, y = tl.sum(norms_x, axis=0), tl.sum(norms_y, axis=0)
    found = tl.sum(tl.sum(squares, axis=1), axis=0) - (B - K) * x - (BN - N) * y
    return found < CLOSE * (K * x + N * y)


@triton.jit
def _differences(gen, neg, pos, stride, N, M, P, width, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """‖x − y‖ from differences."""
    xx = tl.zeros((BN, BN), tl.float32)
    xu = tl.zeros((BN, BM), tl.float32)
    xp = tl.zeros((BN, BP), tl.float32)
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


@triton.jit
def _products(
    gen, neg, pos, stride, N, M, P, width, CENTRED: tl.constexpr, OWN: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """⟨x, y⟩ for y = x, u and p; and if OWN, ⟨u, u'⟩ and ⟨p, p'⟩."""
    xx = tl.zeros((BN, BN), tl.float32)
    xu = tl.zeros((BN, BM), tl.float32)
    xp = tl.zeros((BN, BP), tl.float32)
    uu = tl.zeros((BM, BM), tl.float32)
    pp = tl.zeros((BP, BP), tl.float32)
    for k in range(0, width, BK):
        x = _tile(gen, stride, N, width, k, BN, BK)
        u = _tile(neg, stride, M, width, k, BM, BK)
        p = _tile(pos, stride, P, width, k, BP, BK)
        if CENTRED:
            centre = _middle(gen, pos, stride, N, P, width, k, BK)
            far = tl.maximum(_farthest(x, centre, N, BN), _farthest(u, centre, M, BM))
            far = tl.maximum(far, _farthest(p, centre, P, BP))
            # Between half of a number and its double, differences to it are exact (Sterbenz).
            centre = tl.where(2 * far <= tl.abs(centre), centre, 0.0)
            x, u, p = (
                _centred(x, centre, N, BN, WORK),
                _centred(u, centre, M, BM, WORK),
                _centred(p, centre, P, BP, WORK),
            )
        xx, xu, xp = tl.dot(x, tl.trans(x), xx), tl.dot(x, tl.trans(u), xu), tl.dot(x, tl.trans(p), xp)
        if OWN:
            uu, pp = tl.dot(u, tl.trans(u), uu), tl.dot(p, tl.trans(p), pp)
    return xx, xu, xp, uu, pp


@triton.jit
def first_distances(
    gen, neg, pos, stride, left, N, M, P, width, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """‖x − y‖ for y = x, u and p: ``[BN, BN]``, ``[BN, BM]``, ``[BN, BP]``.

    Leaves the squared norms of all samples for :func:`distances`, and whether coordinates are without the
    common part.
    """
    if DIRECT:
        return _differences(gen, neg, pos, stride, N, M, P, width, BN, BM, BP)
    else:  # what follows an if is compiled in any case
        xx, xu, xp, uu, pp = _products(
            gen, neg, pos, stride, N, M, P, width, False, True, WORK, BN, BM, BP, BK
        )
        norm_x, norm_u, norm_p = _norms(xx, BN), _norms(uu, BM), _norms(pp, BP)
        dx, du, dp = _three(xx, xu, xp, norm_x, norm_u, norm_p)
        close = _is_close(dx, norm_x, norm_x, N, N, BN, BN) | _is_close(dp, norm_x, norm_p, N, P, BN, BP)
        if close:
            xx, xu, xp, uu, pp = _products(
                gen, neg, pos, stride, N, M, P, width, True, True, WORK, BN, BM, BP, BK
            )
            norm_x, norm_u, norm_p = _norms(xx, BN), _norms(uu, BM), _norms(pp, BP)
            dx, du, dp = _three(xx, xu, xp, norm_x, norm_u, norm_p)
        tl.store(left + tl.arange(0, BN), norm_x)
        tl.store(left + BN + tl.arange(0, BM), norm_u)
        tl.store(left + BN + BM + tl.arange(0, BP), norm_p)
        tl.store(left + BN + BM + BP, close.to(tl.float32))
        return tl.sqrt(dx), tl.sqrt(du), tl.sqrt(dp)


@triton.jit
def distances(
    gen, neg, pos, stride, left, N, M, P, width, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The same distances again."""
    if DIRECT:
        return _differences(gen, neg, pos, stride, N, M, P, width, BN, BM, BP)
    else:
        if tl.load(left + BN + BM + BP) > 0:
            xx, xu, xp, _, _ = _products(
                gen, neg, pos, stride, N, M, P, width, True, False, WORK, BN, BM, BP, BK
            )
        else:
            xx, xu, xp, _, _ = _products(
                gen, neg, pos, stride, N, M, P, width, False, False, WORK, BN, BM, BP, BK
            )
        norm_x, norm_u = tl.load(left + tl.arange(0, BN)), tl.load(left + BN + tl.arange(0, BM))
        norm_p = tl.load(left + BN + BM + tl.arange(0, BP))
        dx, du, dp = _three(xx, xu, xp, norm_x, norm_u, norm_p)
        return tl.sqrt(dx), tl.sqrt(du), tl.sqrt(dp)


@triton.jit
def left_width(BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Numbers that :func:`first_distances` leaves for each problem, a multiple of 16 bytes."""
    return BN + BM + BP + 4


@triton.jit
def inside_of(N, K, BN: tl.constexpr, B: tl.constexpr):
    return (tl.arange(0, BN) < N)[:, None] & (tl.arange(0, B) < K)[None, :]


@triton.jit
def tiles(
    gen, neg, pos, stride, N, M, P, width, k, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Numbers k ... k + BK of all samples, for products with coefficients; relative to a point amid them
    where they are turned into float32 anyway.
    """
    x = _tile(gen, stride, N, width, k, BN, BK)
    u = _tile(neg, stride, M, width, k, BM, BK)
    p = _tile(pos, stride, P, width, k, BP, BK)
    if DIRECT:
        centre = _middle(gen, pos, stride, N, P, width, k, BK)
        x = _centred(x, centre, N, BN, WORK)
        u = _centred(u, centre, M, BM, WORK)
        p = _centred(p, centre, P, BP, WORK)
    return x, u, p


@triton.jit
def problem(origin, table, feature_of_vector, V, N, M, P, width):
    """Where this program's problem lies: group, feature, its position in the call, its first number in the
    three sets, how far apart its samples are, and how far its first number is from that of the feature.
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
    return (
        pid,
        group,
        feature,
        tl.load(table + feature * FIELDS + POSITION),
        gen,
        neg,
        pos,
        vectors.to(tl.int32) * width,
        start,
    )
