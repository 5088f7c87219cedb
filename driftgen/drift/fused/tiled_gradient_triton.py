"""The gradient of large groups: a last sweep over tiles, in the backward pass."""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import GRADIENT, address
from driftgen.drift.fused.passes_triton import add_product
from driftgen.drift.fused.tiled_drift_triton import load_columns, load_row_terms, load_sums, tile_affinity
from driftgen.drift.fused.tiled_softmax_triton import rates_of, terms_size
from driftgen.drift.fused.tiles_triton import (
    column_distances,
    count_tiles,
    is_centered,
    locate_tile,
    own_samples,
    row_tile,
    tile_at,
)

__all__ = ["tiled_gradient_kernel"]


@triton.jit
def _normalized(sums, inverse_norms, R: tl.constexpr):
    """Divide the sums of each temperature by λ_τ."""
    values = ()
    for r in tl.static_range(R):
        values = values + (sums[r] * tl.load(inverse_norms + r),)
    return values


@triton.jit
def _gradient_sweep(
    t, k, problem, counts, group, weight, rates, terms, inverse_norms, factor, out, min_distance,
    self_distance, floor, attraction, repulsion,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    N, width = counts[0], problem[4]
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    row_terms = load_row_terms(terms, counts, rows[3], R)
    pushes = _normalized(load_sums(row_terms[3], -repulsion, N, rows[3], R), inverse_norms, R)
    pulls = _normalized(load_sums(row_terms[2], attraction, N, rows[3], R), inverse_norms, R)
    _, repelling, tiles = count_tiles(counts, BM)
    total, drift = tl.zeros((BN,), tl.float32), tl.zeros((BN, BD), tl.float32)
    for column in range(0, tiles):
        distance, j, exists = column_distances(
            column, rows, problem, counts, min_distance, self_distance,
            CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
        )  # fmt: skip
        columns = load_columns(terms, counts, group, weight, j, exists, WEIGHTED, BOTH)
        c = tl.zeros((BN, BM), tl.float32)
        for r in tl.static_range(R):
            a = tile_affinity(
                r, distance, row_terms, columns, terms, counts, rates, floor,
                WEIGHTED, RAGGED, KERNEL, BOTH, WEIGHTED_SOFTMAX,
            )  # fmt: skip
            c += tl.where(column < repelling, pushes[r], pulls[r])[:, None] * a
        samples, first, count, _ = tile_at(column, problem, counts, BM)
        y = own_samples(samples, first, count, k, problem, counts, DIRECT, WORK, BM, BD)
        high = c.to(WORK)
        drift = add_product(drift, high, y)
        if tl.float32 != WORK:
            low = (c - high.to(tl.float32)).to(WORK)
            drift = add_product(drift, low, y)
            c = high.to(tl.float32) + low.to(tl.float32)
        total += tl.sum(c, axis=1)
    x = own_samples(rows[0], rows[1], rows[2], k, problem, counts, DIRECT, WORK, BN, BD).to(tl.float32)
    drift = (drift - total[:, None] * x) * factor
    i, column = rows[3], k + tl.arange(0, BD)
    inside = (i < N)[:, None] & (column < width)[None, :]
    tl.store(out + i[:, None] * problem[3] + column[None, :], drift.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["by_group", "V", "N", "M", "P"])
def tiled_gradient_kernel(
    origin, table, feature_of_vector, weight, units, norms, temperatures, sample_data, softmax_terms,
    upstream, by_group, V, N, M, P, width, min_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    R: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write BD coordinates of the gradient of BN generated samples, upstream · factor · Σ_τ V_τ / λ_τ."""
    counts, parts = (N, M, P), tl.cdiv(width, BD)
    tiles, _, _ = count_tiles(counts, BN)
    tile, pid, group, feature, position, offset, problem = locate_tile(
        tiles * parts, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )
    unit = tl.load(units + position * 2).to(tl.float32)
    rates = rates_of(temperatures, unit, R)
    terms = softmax_terms + pid * terms_size(counts, R)
    norms += position * (1 + R)
    factor = tl.load(norms) * tl.load(upstream + group * by_group)
    out = address(origin, table, feature, GRADIENT) + offset
    t, k = tile // parts, tile % parts * BD
    if is_centered(problem, counts, DIRECT):
        _gradient_sweep(
            t, k, problem, counts, group, weight, rates, terms, norms + 1, factor, out, min_distance,
            self_distance * unit, floor, attraction, repulsion, not DIRECT, WORK, WEIGHTED, RAGGED, DIRECT,
            ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
        )  # fmt: skip
    else:
        _gradient_sweep(
            t, k, problem, counts, group, weight, rates, terms, norms + 1, factor, out, min_distance,
            self_distance * unit, floor, attraction, repulsion, False, WORK, WEIGHTED, RAGGED, DIRECT,
            ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
        )  # fmt: skip
