"""The first sweeps over the tiles of large groups: sums of distances, and softmax terms.

One program computes BN rows of one problem: it sweeps over all samples, BM columns at a time, and keeps only
sums. The sweeps, in order:

1. ``tiled_scale_kernel``: Σ w ‖x − y‖ of the rows. Programs may share the columns of a row;
2. ``softmax_kernel``: least distance and Σ k of each row and column for all temperatures. Rows are tiles of
   all three sets: the sums of a negative or positive over generated samples are those of its column. For wide
   vectors, whose distances take longest, rows are generated samples alone (ONE_SWEEP): each tile of rows
   stores its part of the sums of the columns, and ``column_terms_kernel`` adds them up;
3. the kernels of ``tiled_drift_triton``: sums of A, products of drifts, gradient.

Every kernel writes each value once, and the tiles of a problem are added up in a fixed order, so that results
do not depend on the order in which programs finish.

Softmax terms of a problem with T samples: logarithms of the factors of columns of A, ``[R, T]``; logarithms
of the factors of rows of A, and the sums of A over repelling and attracting samples, S⁻ and S⁺, ``[R, N]``
each. A = √(k / Σ_y k · k / Σ_x k) = 2^(log₂ k + row + column), where row is −½ log₂ Σ_y k and column
−½ log₂ Σ_x k, so that the factors cost each pair one addition. Without normalization of columns, row is
−log₂ Σ_y k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.affinities_triton import (
    PADDED,
    column_sum,
    log2_kernel,
    or_else,
    row_min,
    row_sum,
)
from driftgen.drift.fused.tiles_triton import (
    column_distances,
    column_weights,
    count_tiles,
    is_centered,
    locate_tile,
    locate_tile_at,
    row_tile,
)

__all__ = [
    "column_terms_kernel",
    "rates_of",
    "softmax_kernel",
    "terms_size",
    "tiled_scale_kernel",
    "zero_sums",
]


@triton.jit
def _scale_sweep(
    t, begin, end, problem, counts, group, weight, out, min_distance,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    total = tl.zeros((BN,), tl.float32)
    for column in range(begin, end):
        distance, j, exists = column_distances(
            column, rows, problem, counts, min_distance, 0.0,
            CENTERED, WORK, DIRECT, ONE, RAGGED, False, DK, BN, BM, BK,
        )  # fmt: skip
        if RAGGED or WEIGHTED:
            distance *= column_weights(weight, group, counts, j, exists, WEIGHTED)[None, :]
        total += tl.sum(distance, axis=1)
    tl.store(out, tl.sum(tl.where(rows[3] < counts[0], total, 0.0), axis=0))


@triton.jit(do_not_specialize=["splits", "V"])
def tiled_scale_kernel(
    origin, table, feature_of_vector, weight, sample_data, sums, splits, V, N, M, P, width, min_distance,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Sum Σ_ij w_j ‖x_i − y_j‖ of each tile of rows, ``[problems, tiles, splits]``.

    The column tiles are split into ``splits`` parts, so that few rows occupy the GPU.
    """
    counts = (N, M, P)
    programs, columns = count_tiles(counts, BN)[0] * splits, count_tiles(counts, BM)[2]
    program, pid, group, _, _, _, problem = locate_tile(
        programs, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )
    out = sums + pid * programs + program
    t, split = program // splits, program % splits
    begin, end = columns * split // splits, columns * (split + 1) // splits
    if is_centered(problem, counts, DIRECT):
        _scale_sweep(
            t, begin, end, problem, counts, group, weight, out, min_distance,
            not DIRECT, WORK, WEIGHTED, RAGGED, DIRECT, ONE, DK, BN, BM, BK,
        )  # fmt: skip
    else:
        _scale_sweep(
            t, begin, end, problem, counts, group, weight, out, min_distance,
            False, WORK, WEIGHTED, RAGGED, DIRECT, ONE, DK, BN, BM, BK,
        )  # fmt: skip


@triton.jit
def rates_of(temperatures, unit, R: tl.constexpr):
    """1 / (τ · unit) of each temperature."""
    rates = ()
    for r in tl.static_range(R):
        rates = rates + (1.0 / (tl.load(temperatures + r) * unit),)
    return rates


@triton.jit
def zero_sums(R: tl.constexpr, BN: tl.constexpr):
    values = ()
    for _ in tl.static_range(R):
        values = values + (tl.zeros((BN,), tl.float32),)
    return values


@triton.jit
def _add_kernels(
    near, sums, distance, w, rates, KERNEL: tl.constexpr, WEIGHTED: tl.constexpr, R: tl.constexpr
):
    """Add a tile to Σ k / k(near) of each row. ``near``, the least distance so far, becomes smaller."""
    least = tl.minimum(near, row_min(distance, w, WEIGHTED))
    reference = or_else(least, 0.0)
    updated = ()
    for r in tl.static_range(R):
        most = log2_kernel(reference, rates[r], KERNEL)
        smaller = tl.exp2(log2_kernel(near, rates[r], KERNEL) - most)
        added = row_sum(distance, most, w, rates[r], KERNEL, WEIGHTED)
        updated = updated + (sums[r] * smaller + added,)
    return least, updated


@triton.jit
def _log2_sum(near, total, rate, KERNEL: tl.constexpr):
    """log₂ Σ k, given the least distance and Σ k / k(near)."""
    return log2_kernel(near, rate, KERNEL) + tl.log2(tl.maximum(total, 1e-30))


@triton.jit
def _store_column_sums(
    sums, t, distance, own, j, exists, counts, rates, KERNEL: tl.constexpr, R: tl.constexpr
):
    """Store the least distance and Σ k / k(least) over the rows of tile t, for each of a tile of other
    samples. ``sums`` is ``[tiles, 1 + R, others]``.
    """
    others = counts[1] + counts[2]
    distance = tl.where(own[:, None], distance, PADDED)
    near = or_else(tl.min(distance, axis=0), 0.0)
    out = sums + t * ((1 + R) * others) + j - counts[0]
    tl.store(out, near, mask=exists)
    for r in tl.static_range(R):
        tl.store(out + (1 + r) * others, column_sum(distance, near, rates[r], KERNEL), mask=exists)


@triton.jit
def _softmax_sweep(
    t, problem, counts, group, weight, rates, terms, column_sums, min_distance, self_distance,
    CENTERED: tl.constexpr, WORK: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    R: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr, ONE_SWEEP: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    N, T = counts[0], counts[0] + counts[1] + counts[2]
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    generated, _, tiles = count_tiles(counts, BM)
    is_generated = rows[3] < N
    own = rows[1] + tl.arange(0, BN) < rows[2]
    near, sums = tl.full((BN,), PADDED, tl.float32), zero_sums(R, BN)
    nearest, totals = tl.full((BN,), PADDED, tl.float32), zero_sums(R, BN)
    for column in range(0, generated):
        distance, j, exists = column_distances(
            column, rows, problem, counts, min_distance, self_distance,
            CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
        )  # fmt: skip
        w = column_weights(weight, group, counts, j, exists, WEIGHTED_SOFTMAX)
        near, sums = _add_kernels(near, sums, distance, w, rates, KERNEL, False, R)
        if WEIGHTED_SOFTMAX:
            nearest, totals = _add_kernels(nearest, totals, distance, w, rates, KERNEL, True, R)
    if not WEIGHTED_SOFTMAX:  # the sums of a row begin with those over generated samples
        nearest, totals = near, sums
    # Columns of other samples are sums over generated samples alone.
    end = tl.where(t < tl.cdiv(N, BN), tiles, generated)
    for column in range(generated, end):
        distance, j, exists = column_distances(
            column, rows, problem, counts, min_distance, self_distance,
            CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
        )  # fmt: skip
        w = column_weights(weight, group, counts, j, exists, WEIGHTED_SOFTMAX)
        nearest, totals = _add_kernels(nearest, totals, distance, w, rates, KERNEL, WEIGHTED_SOFTMAX, R)
        if ONE_SWEEP:
            _store_column_sums(column_sums, t, distance, own, j, exists, counts, rates, KERNEL, R)
    nearest = or_else(nearest, 0.0)
    near = or_else(near, nearest)
    for r in tl.static_range(R):
        by_row = _log2_sum(nearest, totals[r], rates[r], KERNEL)
        if BOTH:
            by_row *= 0.5
            by_column = 0.5 * _log2_sum(near, sums[r], rates[r], KERNEL)
            tl.store(terms + T * r + rows[3], -by_column, mask=own)
        # Rows for which no sample has weight do not drift.
        by_row = tl.where(totals[r] > 1e-30, by_row, PADDED)
        tl.store(terms + T * R + N * r + rows[3], -by_row, mask=own & is_generated)


@triton.jit
def terms_size(counts, R: tl.constexpr):
    """Elements of the softmax terms of a problem."""
    return ((counts[0] + counts[1] + counts[2]) * R + counts[0] * 3 * R).to(tl.int64)


@triton.jit(do_not_specialize=["V"])
def softmax_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, sample_data, softmax_terms, column_sums,
    V, N, M, P, width, min_distance, self_distance,
    WORK: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr,
    KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    ONE_SWEEP: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Store the factors of rows and columns of A, or the parts of ``column_terms_kernel`` for the columns of
    other samples (ONE_SWEEP). Then, and without normalization of columns, only tiles of generated samples
    have programs. The rows of generated samples take longest: they come first.
    """
    counts = (N, M, P)
    generated, _, all_tiles = count_tiles(counts, BN)
    ALL_ROWS: tl.constexpr = BOTH and not ONE_SWEEP
    tiles = all_tiles if ALL_ROWS else generated
    program = tl.program_id(0).to(tl.int64)
    number = program
    if ALL_ROWS:
        others = tl.maximum(tiles - generated, 1)
        later = program - tl.num_programs(0) // tiles * generated
        first = program // generated * tiles + program % generated
        number = tl.where(later < 0, first, later // others * tiles + generated + later % others)
    t, pid, group, _, position, _, problem = locate_tile_at(
        number, tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )
    unit = tl.load(units + position * 2).to(tl.float32)
    rates = rates_of(temperatures, unit, R)
    terms = softmax_terms + pid * terms_size(counts, R)
    if ONE_SWEEP:
        column_sums += pid * (tiles * (1 + R) * (M + P))
    if is_centered(problem, counts, DIRECT):
        _softmax_sweep(
            t, problem, counts, group, weight, rates, terms, column_sums, min_distance, self_distance * unit,
            not DIRECT, WORK, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX,
            ONE_SWEEP, DK, BN, BM, BK,
        )  # fmt: skip
    else:
        _softmax_sweep(
            t, problem, counts, group, weight, rates, terms, column_sums, min_distance, self_distance * unit,
            False, WORK, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX,
            ONE_SWEEP, DK, BN, BM, BK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["V"])
def column_terms_kernel(
    origin, table, feature_of_vector, units, temperatures, sample_data, column_sums, softmax_terms,
    V, N, M, P, width, tiles, DIRECT: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    DK: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Store the factors of the columns of others, from the sums over each of ``tiles`` tiles of rows."""
    counts, others = (N, M, P), M + P
    block, pid, _, _, position, _, _ = locate_tile(
        tl.cdiv(others, B), origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )
    rates = rates_of(temperatures, tl.load(units + position * 2).to(tl.float32), R)
    j = block * B + tl.arange(0, B)
    exists = j < others
    sums = column_sums + pid * (tiles * (1 + R) * others) + j
    near = tl.full((B,), PADDED, tl.float32)
    for t in range(tiles):
        near = tl.minimum(near, tl.load(sums + t * ((1 + R) * others), mask=exists, other=0.0))
    totals = zero_sums(R, B)
    for t in range(tiles):
        of_tile, updated = sums + t * ((1 + R) * others), ()
        least = tl.load(of_tile, mask=exists, other=0.0)
        for r in tl.static_range(R):
            smaller = tl.exp2(log2_kernel(least, rates[r], KERNEL) - log2_kernel(near, rates[r], KERNEL))
            total = tl.load(of_tile + (1 + r) * others, mask=exists, other=0.0)
            updated = updated + (totals[r] + total * smaller,)
        totals = updated
    terms = softmax_terms + pid * terms_size(counts, R)
    for r in tl.static_range(R):
        by_column = 0.5 * _log2_sum(near, totals[r], rates[r], KERNEL)
        tl.store(terms + (N + others) * r + N + j, -by_column, mask=exists)
