"""Sample addresses and pairwise distances of a problem, shared by all kernels of the loss."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "CLOSE",
    "FIELDS",
    "FIRST",
    "GENERATED",
    "GRADIENT",
    "GROUP_STRIDE",
    "MAX_SQUARE",
    "NEGATIVES",
    "POSITION",
    "POSITIVES",
    "VECTORS",
    "address",
    "centered",
    "diagonal",
    "distances",
    "distances_and_norms",
    "load_coordinate",
    "load_rows",
    "load_tiles",
    "locate",
    "locate_problem",
    "median_of_three",
    "pair_mask",
    "sample_norms_size",
    "squares",
]

# Columns of the feature table: offsets of the sets and of the gradient from ``origin``, and layout.
GENERATED = tl.constexpr(0)
NEGATIVES = tl.constexpr(1)
POSITIVES = tl.constexpr(2)
GRADIENT = tl.constexpr(3)
VECTORS = tl.constexpr(4)
FIRST = tl.constexpr(5)
GROUP_STRIDE = tl.constexpr(6)  # in vectors, of the generated samples, negatives and positives
POSITION = tl.constexpr(9)  # position of the feature in the call
FIELDS = tl.constexpr(10)
MAX_SQUARE = tl.constexpr(3.0e38)
# Ratio of mean |x − y|² to mean |x|² + |y|² below which digits would cancel. Write it right of a tensor:
# on the left, the interpreter of Triton 3.7 makes a constant of the product.
CLOSE = tl.constexpr(1 / 64)


@triton.jit
def address(origin, table, feature, column: tl.constexpr):
    """Pointer to the samples of a feature. Its offset from ``origin`` is a multiple of 16 bytes."""
    offset = tl.load(table + feature * FIELDS + column)
    return origin + tl.multiple_of(offset, 128 // origin.dtype.element_ty.primitive_bitwidth)


@triton.jit
def _samples(origin, table, feature, column: tl.constexpr, group, vector, width):
    """Pointer to the first element of a problem in one of the sets."""
    group_stride = tl.load(table + feature * FIELDS + GROUP_STRIDE + column)
    return address(origin, table, feature, column) + (group * group_stride + vector) * width


@triton.jit
def load_rows(pointer, stride, first, samples, width, k, B: tl.constexpr, BK: tl.constexpr):
    """Load elements k to k + BK of the B samples from ``first``, ``[B, BK]``, zero outside."""
    row, column = first + tl.arange(0, B), k + tl.arange(0, BK)
    inside = (row < samples)[:, None] & (column < width)[None, :]
    return tl.load(pointer + row[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _load_tile(pointer, stride, samples, width, k, B: tl.constexpr, BK: tl.constexpr):
    """Load elements k to k + BK of each sample, ``[B, BK]``, zero outside."""
    return load_rows(pointer, stride, 0, samples, width, k, B, BK)


@triton.jit
def _load_sample(pointer, stride, sample, width, k, BK: tl.constexpr):
    column = k + tl.arange(0, BK)
    return tl.load(pointer + sample * stride + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def median_of_three(gen, pos, stride, N, P, width, k, BK: tl.constexpr):
    """Coordinate-wise median of three samples, ``[BK]``. One outlier cannot move it."""
    a = _load_sample(gen, stride, 0, width, k, BK)
    b = _load_sample(gen, stride, N // 2, width, k, BK)
    c = _load_sample(pos, stride, P - 1, width, k, BK)
    return tl.maximum(tl.minimum(a, b), tl.minimum(tl.maximum(a, b), c))


@triton.jit
def _max_deviation(tile, center, samples, B: tl.constexpr):
    """Largest absolute difference from the center in each coordinate."""
    inside = (tl.arange(0, B) < samples)[:, None]
    return tl.max(tl.where(inside, tl.abs(tile.to(tl.float32) - center[None, :]), 0.0), axis=0)


@triton.jit
def centered(tile, center, samples, B: tl.constexpr, WORK: tl.constexpr):
    inside = (tl.arange(0, B) < samples)[:, None]
    return tl.where(inside, tile.to(tl.float32) - center[None, :], 0.0).to(WORK)


@triton.jit
def diagonal(product, B: tl.constexpr):
    """Squared norms of B samples from their products with each other."""
    i = tl.arange(0, B)
    return tl.sum(tl.where(i[:, None] == i[None, :], product, 0.0), axis=1)


@triton.jit
def squares(product, square_x, square_y):
    # Rounding may make a square negative. Its absolute value is no less accurate, and taking it is free.
    return tl.minimum(tl.abs(square_x[:, None] + square_y[None, :] - 2 * product), MAX_SQUARE)


@triton.jit
def _all_squares(xx, xu, xp, norm_x, norm_u, norm_p):
    return squares(xx, norm_x, norm_x), squares(xu, norm_x, norm_u), squares(xp, norm_x, norm_p)


@triton.jit
def _is_close(squares, norms_x, norms_y, N, K, BN: tl.constexpr, B: tl.constexpr):
    """Return True if Σ |x − y|² is small relative to Σ |x|² + |y|². Padded samples have norm 0."""
    x, y = tl.sum(norms_x, axis=0), tl.sum(norms_y, axis=0)
    total = tl.sum(tl.sum(squares, axis=1), axis=0) - (B - K) * x - (BN - N) * y
    return total < (K * x + N * y) * CLOSE


@triton.jit
def load_coordinate(pointer, stride, first, samples, k, B: tl.constexpr):
    """Load element k of the B samples from ``first`` in float32, ``[B]``, zero outside."""
    row = first + tl.arange(0, B)
    return tl.load(pointer + row * stride + k, mask=row < samples, other=0.0).to(tl.float32)


@triton.jit
def _differences(gen, neg, pos, stride, N, M, P, width, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Distances ‖x − y‖ from differences."""
    xx = tl.zeros((BN, BN), tl.float32)
    xu = tl.zeros((BN, BM), tl.float32)
    xp = tl.zeros((BN, BP), tl.float32)
    for k in range(width):
        x = load_coordinate(gen, stride, 0, N, k, BN)
        u = load_coordinate(neg, stride, 0, M, k, BM)
        p = load_coordinate(pos, stride, 0, P, k, BP)
        by_x, by_u, by_p = x[:, None] - x[None, :], x[:, None] - u[None, :], x[:, None] - p[None, :]
        xx += by_x * by_x
        xu += by_u * by_u
        xp += by_p * by_p
    return (
        tl.sqrt(tl.minimum(xx, MAX_SQUARE)),
        tl.sqrt(tl.minimum(xu, MAX_SQUARE)),
        tl.sqrt(tl.minimum(xp, MAX_SQUARE)),
    )


@triton.jit
def _products(
    gen, neg, pos, stride, N, M, P, width, CENTERED: tl.constexpr, OWN: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Inner products ⟨x, y⟩ for y = x, u and p; and if OWN, ⟨u, u'⟩ and ⟨p, p'⟩."""
    xx = tl.zeros((BN, BN), tl.float32)
    xu = tl.zeros((BN, BM), tl.float32)
    xp = tl.zeros((BN, BP), tl.float32)
    uu = tl.zeros((BM, BM), tl.float32)
    pp = tl.zeros((BP, BP), tl.float32)
    for k in range(0, width, BK):
        x = _load_tile(gen, stride, N, width, k, BN, BK)
        u = _load_tile(neg, stride, M, width, k, BM, BK)
        p = _load_tile(pos, stride, P, width, k, BP, BK)
        if CENTERED:
            center = median_of_three(gen, pos, stride, N, P, width, k, BK)
            deviation = tl.maximum(_max_deviation(x, center, N, BN), _max_deviation(u, center, M, BM))
            deviation = tl.maximum(deviation, _max_deviation(p, center, P, BP))
            # Differences from a number are exact between its half and its double (Sterbenz).
            center = tl.where(2 * deviation <= tl.abs(center), center, 0.0)
            x, u, p = (
                centered(x, center, N, BN, WORK),
                centered(u, center, M, BM, WORK),
                centered(p, center, P, BP, WORK),
            )
        xx, xu, xp = tl.dot(x, tl.trans(x), xx), tl.dot(x, tl.trans(u), xu), tl.dot(x, tl.trans(p), xp)
        if OWN:
            uu, pp = tl.dot(u, tl.trans(u), uu), tl.dot(p, tl.trans(p), pp)
    return xx, xu, xp, uu, pp


@triton.jit
def distances_and_norms(
    gen, neg, pos, stride, sample_norms, N, M, P, width, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Distances ‖x − y‖ for y = x, u and p: ``[BN, BN]``, ``[BN, BM]``, ``[BN, BP]``.

    Stores the squared norms of all samples for :func:`distances`, and a flag that is 1 if coordinates were
    centered.
    """
    if DIRECT:
        return _differences(gen, neg, pos, stride, N, M, P, width, BN, BM, BP)
    else:  # Triton compiles statements after an ``if`` even if its body returns
        xx, xu, xp, uu, pp = _products(
            gen, neg, pos, stride, N, M, P, width, False, True, WORK, BN, BM, BP, BK
        )
        norm_x, norm_u, norm_p = diagonal(xx, BN), diagonal(uu, BM), diagonal(pp, BP)
        dx, du, dp = _all_squares(xx, xu, xp, norm_x, norm_u, norm_p)
        close = _is_close(dx, norm_x, norm_x, N, N, BN, BN) | _is_close(dp, norm_x, norm_p, N, P, BN, BP)
        if close:
            xx, xu, xp, uu, pp = _products(
                gen, neg, pos, stride, N, M, P, width, True, True, WORK, BN, BM, BP, BK
            )
            norm_x, norm_u, norm_p = diagonal(xx, BN), diagonal(uu, BM), diagonal(pp, BP)
            dx, du, dp = _all_squares(xx, xu, xp, norm_x, norm_u, norm_p)
        tl.store(sample_norms + tl.arange(0, BN), norm_x)
        tl.store(sample_norms + BN + tl.arange(0, BM), norm_u)
        tl.store(sample_norms + BN + BM + tl.arange(0, BP), norm_p)
        tl.store(sample_norms + BN + BM + BP, close.to(tl.float32))
        return tl.sqrt(dx), tl.sqrt(du), tl.sqrt(dp)


@triton.jit
def distances(
    gen, neg, pos, stride, sample_norms, N, M, P, width, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Distances as :func:`distances_and_norms` computes them, from the stored norms."""
    if DIRECT:
        return _differences(gen, neg, pos, stride, N, M, P, width, BN, BM, BP)
    else:
        if tl.load(sample_norms + BN + BM + BP) > 0:
            xx, xu, xp, _, _ = _products(
                gen, neg, pos, stride, N, M, P, width, True, False, WORK, BN, BM, BP, BK
            )
        else:
            xx, xu, xp, _, _ = _products(
                gen, neg, pos, stride, N, M, P, width, False, False, WORK, BN, BM, BP, BK
            )
        norm_x = tl.load(sample_norms + tl.arange(0, BN))
        norm_u = tl.load(sample_norms + BN + tl.arange(0, BM))
        norm_p = tl.load(sample_norms + BN + BM + tl.arange(0, BP))
        dx, du, dp = _all_squares(xx, xu, xp, norm_x, norm_u, norm_p)
        return tl.sqrt(dx), tl.sqrt(du), tl.sqrt(dp)


@triton.jit
def sample_norms_size(BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Elements that :func:`distances_and_norms` stores for each problem, a multiple of 16 bytes."""
    return BN + BM + BP + 4


@triton.jit
def pair_mask(N, K, BN: tl.constexpr, B: tl.constexpr):
    """True for pairs of existing samples, ``[BN, B]``."""
    return (tl.arange(0, BN) < N)[:, None] & (tl.arange(0, B) < K)[None, :]


@triton.jit
def load_tiles(
    gen, neg, pos, stride, N, M, P, width, k, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Load elements k to k + BK of all samples, for products with coefficients. If distances are computed
    from differences, the samples become float32 and are centered.
    """
    x = _load_tile(gen, stride, N, width, k, BN, BK)
    u = _load_tile(neg, stride, M, width, k, BM, BK)
    p = _load_tile(pos, stride, P, width, k, BP, BK)
    if DIRECT:
        center = median_of_three(gen, pos, stride, N, P, width, k, BK)
        x = centered(x, center, N, BN, WORK)
        u = centered(u, center, M, BM, WORK)
        p = centered(p, center, P, BP, WORK)
    return x, u, p


@triton.jit
def locate_problem(origin, table, feature_of_vector, V, N, M, P, width):
    """Locate this program's problem; see :func:`locate`."""
    return locate(tl.program_id(0).to(tl.int64), origin, table, feature_of_vector, V, N, width)


@triton.jit
def locate(pid, origin, table, feature_of_vector, V, N, width):
    """Locate a problem.

    Returns its index, group, feature, position of the feature in the call, pointers to the three sets, the
    stride between samples, and its offset within the gradient of the feature.
    """
    group, vector = pid // V, pid % V
    feature = tl.load(feature_of_vector + vector)
    vectors = tl.load(table + feature * FIELDS + VECTORS)
    own_vector = vector - tl.load(table + feature * FIELDS + FIRST)
    gen = _samples(origin, table, feature, GENERATED, group, own_vector, width)
    neg = _samples(origin, table, feature, NEGATIVES, group, own_vector, width)
    pos = _samples(origin, table, feature, POSITIVES, group, own_vector, width)
    offset = (group * N * vectors + own_vector) * width
    return (
        pid,
        group,
        feature,
        tl.load(table + feature * FIELDS + POSITION),
        gen,
        neg,
        pos,
        vectors.to(tl.int32) * width,
        offset,
    )
