"""Tiles of large problems: their samples, and the distances between two of them.

All samples of a problem are numbered in the order generated, negatives, positives. A tile holds consecutive
samples of one set. Kernels keep one tile as rows and sweep over others as columns. Nothing of the size of all
pairs reaches memory: each kernel computes the distances again. ``strips_triton`` keeps those of some rows.

The kernels store data of the samples of each problem: the squared norms of all T samples; a flag that is 1 if
coordinates are centered; four partial sums for each DK coordinates; and the center of each coordinate. The
arithmetic is that of ``distances_triton``, so that equal samples have distance 0 exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.affinities_triton import PADDED
from driftgen.drift.fused.distances_triton import (
    CLOSE,
    MAX_SQUARE,
    centered,
    diagonal,
    load_coordinate,
    load_rows,
    locate,
    median_of_three,
    squares,
)

__all__ = [
    "center_kernel",
    "column_distances",
    "column_weights",
    "count_tiles",
    "is_centered",
    "load_columns",
    "locate_tile",
    "locate_tile_at",
    "norms_kernel",
    "own_samples",
    "row_tile",
    "tile_at",
]


@triton.jit
def tile_at(t, problem, counts, B: tl.constexpr):
    """Tile t of all samples: pointer to its set, its first sample in the set, the size of the set, and the
    number of its first sample.
    """
    gen, neg, pos, N, M, P = problem[0], problem[1], problem[2], counts[0], counts[1], counts[2]
    before_neg = tl.cdiv(N, B)
    before_pos = before_neg + tl.cdiv(M, B)
    in_gen, in_neg = t < before_neg, t < before_pos
    samples = tl.where(in_gen, gen, tl.where(in_neg, neg, pos))
    first = (t - tl.where(in_gen, 0, tl.where(in_neg, before_neg, before_pos))) * B
    count = tl.where(in_gen, N, tl.where(in_neg, M, P))
    return samples, first, count, first + tl.where(in_gen, 0, tl.where(in_neg, N, N + M))


@triton.jit
def count_tiles(counts, B: tl.constexpr):
    """Number of tiles of generated samples, of repelling samples, and of all samples."""
    generated = tl.cdiv(counts[0], B)
    repelling = generated + tl.cdiv(counts[1], B)
    return generated, repelling, repelling + tl.cdiv(counts[2], B)


@triton.jit
def data_size(T, width, DK: tl.constexpr):
    """Elements of the stored data of a problem, a multiple of 16 bytes."""
    return (T + 1 + 4 * tl.cdiv(width, DK) + width + 3) // 4 * 4


@triton.jit
def locate_tile(
    tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Locate this program's tile and problem; see :func:`locate_tile_at`."""
    program = tl.program_id(0).to(tl.int64)
    return locate_tile_at(
        program, tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )


@triton.jit
def locate_tile_at(
    number, tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK: tl.constexpr,
    DIRECT: tl.constexpr,
):  # fmt: skip
    """Locate a tile and its problem, given the number of the tile among those of all problems. ``tiles`` is
    the number of tiles of each problem.

    Returns the tile; index, group, feature and position of the problem; its offset within the gradient; and
    the problem: pointers to the three sets, stride between samples, width, and stored data. If distances are
    computed from differences, there are no stored data.
    """
    pid, group, feature, position, gen, neg, pos, stride, offset = locate(
        number // tiles, origin, table, feature_of_vector, V, counts[0], width
    )
    if not DIRECT:
        sample_data += pid * data_size(counts[0] + counts[1] + counts[2], width, DK)
    problem = (gen, neg, pos, stride, width, sample_data)
    return (number % tiles).to(tl.int32), pid, group, feature, position, offset, problem


@triton.jit
def _center(problem, counts, DK: tl.constexpr):
    """Pointer to the centers of the coordinates, behind norms, flag and partial sums."""
    return problem[5] + counts[0] + counts[1] + counts[2] + 1 + 4 * tl.cdiv(problem[4], DK)


@triton.jit
def is_centered(problem, counts, DIRECT: tl.constexpr):
    """Return True if the distances of the problem are computed in centered coordinates."""
    if DIRECT:
        return False
    else:
        return tl.load(problem[5] + counts[0] + counts[1] + counts[2]) > 0


@triton.jit
def _load_centered(
    samples, first, count, k, problem, counts, CENTERED: tl.constexpr, WORK: tl.constexpr, DK: tl.constexpr,
    B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile = load_rows(samples, problem[3], first, count, problem[4], k, B, BK)
    if CENTERED:
        column = k + tl.arange(0, BK)
        center = tl.load(_center(problem, counts, DK) + column, mask=column < problem[4], other=0.0)
        tile = centered(tile, center, count - first, B, WORK)
    return tile


@triton.jit
def row_tile(
    t, problem, counts, CENTERED: tl.constexpr, WORK: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    DK: tl.constexpr, B: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The rows of a program: pointer to the set, first sample in it, its size, number of each sample, squared
    norms, and, if BK elements hold whole samples (ONE), the samples.
    """
    samples, first, count, start = tile_at(t, problem, counts, B)
    i = tl.arange(0, B)
    norm, whole = 0.0, 0.0
    if not DIRECT:
        norm = tl.load(problem[5] + start + i, mask=first + i < count, other=0.0)
        if ONE:
            whole = _load_centered(samples, first, count, 0, problem, counts, CENTERED, WORK, DK, B, BK)
    return samples, first, count, start + i, norm, whole


@triton.jit
def _tile_products(
    rows, samples, first, count, problem, counts, CENTERED: tl.constexpr, WORK: tl.constexpr,
    ONE: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Inner products ⟨x, y⟩ of two tiles."""
    if ONE:
        y = _load_centered(samples, first, count, 0, problem, counts, CENTERED, WORK, DK, BM, BK)
        return tl.dot(rows[5], tl.trans(y))
    else:
        product = tl.zeros((BN, BM), tl.float32)
        for k in range(0, problem[4], BK):
            x = _load_centered(rows[0], rows[1], rows[2], k, problem, counts, CENTERED, WORK, DK, BN, BK)
            y = _load_centered(samples, first, count, k, problem, counts, CENTERED, WORK, DK, BM, BK)
            product = tl.dot(x, tl.trans(y), product)
        return product


@triton.jit
def _tile_differences(rows, samples, first, count, problem, BN: tl.constexpr, BM: tl.constexpr):
    """Squared distances |x − y|² of two tiles from differences."""
    total = tl.zeros((BN, BM), tl.float32)
    for k in range(problem[4]):
        x = load_coordinate(rows[0], problem[3], rows[1], rows[2], k, BN)
        y = load_coordinate(samples, problem[3], first, count, k, BM)
        difference = x[:, None] - y[None, :]
        total += difference * difference
    return tl.minimum(total, MAX_SQUARE)


@triton.jit
def load_columns(pointer, exists, RAGGED: tl.constexpr):
    """Load one value for each sample of a tile, 0 for those that do not exist. Threads load these values
    between the products of a tile and its affinities, so that a mask for each would take as long as they do.
    """
    if RAGGED:
        return tl.load(pointer, mask=exists, other=0.0)
    else:
        return tl.load(pointer)


@triton.jit
def column_distances(
    t, rows, problem, counts, min_distance, self_distance, CENTERED: tl.constexpr, WORK: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, RAGGED: tl.constexpr, MASKED: tl.constexpr, DK: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Distances from the rows to tile t with guards, padding and self-distance; the numbers of the samples of
    the tile; and a mask of those that exist.
    """
    samples, first, count, start = tile_at(t, problem, counts, BM)
    j = tl.arange(0, BM)
    exists = first + j < count
    if DIRECT:
        square = _tile_differences(rows, samples, first, count, problem, BN, BM)
    else:
        product = _tile_products(
            rows, samples, first, count, problem, counts, CENTERED, WORK, ONE, DK, BN, BM, BK
        )
        square = squares(product, rows[4], load_columns(problem[5] + start + j, exists, RAGGED))
    distance = tl.maximum(tl.sqrt(square), min_distance)
    if RAGGED:
        distance = tl.where(exists[None, :], distance, PADDED)
    own = rows[3][:, None] == (start + j)[None, :]
    return tl.where(own, PADDED if MASKED else distance + self_distance, distance), start + j, exists


@triton.jit
def column_weights(weight, group, counts, j, exists, WEIGHTED: tl.constexpr):
    """Weights of the samples j of a group, zero for those that do not exist."""
    if WEIGHTED:
        return tl.load(weight + group * (counts[0] + counts[1] + counts[2]) + j, mask=exists, other=0.0)
    return tl.where(exists, 1.0, 0.0)


@triton.jit
def own_samples(
    samples, first, count, k, problem, counts, DIRECT: tl.constexpr, WORK: tl.constexpr,
    B: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Load elements k to k + BD of a tile for products with coefficients. If distances are computed from
    differences, the samples become float32 and are centered.
    """
    tile = load_rows(samples, problem[3], first, count, problem[4], k, B, BD)
    if DIRECT:
        center = median_of_three(problem[0], problem[2], problem[3], counts[0], counts[2], problem[4], k, BD)
        tile = centered(tile, center, count - first, B, WORK)
    return tile


@triton.jit
def _add_up(total, square, deviation, center, samples, count, k, problem, B: tl.constexpr, DK: tl.constexpr):
    """Add the samples of a set and their squares to the sums of each coordinate in every B-th sample. Update
    the largest deviation from the center.
    """
    # Stages: without them, only samples of matrix products are loaded ahead.
    for first in tl.range(0, count, B, num_stages=4):
        tile = load_rows(samples, problem[3], first, count, problem[4], k, B, DK).to(tl.float32)
        inside = (first + tl.arange(0, B) < count)[:, None]
        total += tile
        square += tile * tile
        deviation = tl.maximum(deviation, tl.where(inside, tl.abs(tile - center[None, :]), 0.0))
    return total, square, deviation


@triton.jit(do_not_specialize=["V"])
def center_kernel(
    origin, table, feature_of_vector, sample_data, V, N, M, P, width, B: tl.constexpr, DK: tl.constexpr,
):  # fmt: skip
    """Store the center of each coordinate, or 0 if differences from it would be rounded; and the partial sums
    Σ|x|², Σ|p|², |Σx|² and ⟨Σx, Σp⟩ of DK coordinates, from which :func:`norms_kernel` decides.
    """
    counts, parts = (N, M, P), tl.cdiv(width, DK)
    part, _, _, _, _, _, problem = locate_tile(
        parts, origin, table, feature_of_vector, sample_data, V, counts, width, DK, False
    )
    k = part * DK
    center = median_of_three(problem[0], problem[2], problem[3], N, P, width, k, DK)
    zero = tl.zeros((B, DK), tl.float32)
    sum_x, square_x, deviation = _add_up(zero, zero, zero, center, problem[0], N, k, problem, B, DK)
    _, _, deviation = _add_up(zero, zero, deviation, center, problem[1], M, k, problem, B, DK)
    sum_p, square_p, deviation = _add_up(zero, zero, deviation, center, problem[2], P, k, problem, B, DK)
    sum_x, sum_p, deviation = tl.sum(sum_x, axis=0), tl.sum(sum_p, axis=0), tl.max(deviation, axis=0)
    # Differences from a number are exact between its half and its double (Sterbenz).
    center = tl.where(2 * deviation <= tl.abs(center), center, 0.0)
    column = k + tl.arange(0, DK)
    tl.store(_center(problem, counts, DK) + column, center, mask=column < width)
    sums = problem[5] + N + M + P + 1 + 4 * part
    tl.store(sums, tl.sum(tl.sum(square_x, axis=0), axis=0))
    tl.store(sums + 1, tl.sum(tl.sum(square_p, axis=0), axis=0))
    tl.store(sums + 2, tl.sum(sum_x * sum_x, axis=0))
    tl.store(sums + 3, tl.sum(sum_x * sum_p, axis=0))


@triton.jit
def _is_close(sums, N, P, parts):
    """Return True if Σ |x − y|² is small relative to Σ |x|² + |y|², for y = x or p."""
    x, p, xx, xp = 0.0, 0.0, 0.0, 0.0
    for part in range(parts):
        x += tl.load(sums + 4 * part)
        p += tl.load(sums + 4 * part + 1)
        xx += tl.load(sums + 4 * part + 2)
        xp += tl.load(sums + 4 * part + 3)
    among, to_positives = 2 * N * x, P * x + N * p
    return (among - 2 * xx < among * CLOSE) | (to_positives - 2 * xp < to_positives * CLOSE)


@triton.jit
def _store_norms(
    t, problem, counts, CENTERED: tl.constexpr, WORK: tl.constexpr, DK: tl.constexpr, B: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # The norms are those of the products of the sweeps, whose rows do not need norms here.
    rows = row_tile(t, problem, counts, CENTERED, WORK, True, False, DK, B, BK)
    product = _tile_products(
        rows, rows[0], rows[1], rows[2], problem, counts, CENTERED, WORK, False, DK, B, B, BK
    )
    tl.store(problem[5] + rows[3], diagonal(product, B), mask=rows[1] + tl.arange(0, B) < rows[2])


@triton.jit(do_not_specialize=["V"])
def norms_kernel(
    origin, table, feature_of_vector, sample_data, V, N, M, P, width,
    WORK: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the squared norms of all samples, centered if samples are close together and far from the origin,
    and the flag that says so.
    """
    counts = (N, M, P)
    _, _, tiles = count_tiles(counts, BN)
    t, _, _, _, _, _, problem = locate_tile(
        tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, False
    )
    flag = problem[5] + N + M + P
    close = _is_close(flag + 1, N, P, tl.cdiv(width, DK))
    if t == 0:
        tl.store(flag, close.to(tl.float32))
    if close:
        _store_norms(t, problem, counts, True, WORK, DK, BN, BK)
    else:
        _store_norms(t, problem, counts, False, WORK, DK, BN, BK)
