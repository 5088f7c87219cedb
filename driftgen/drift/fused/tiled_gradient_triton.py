"""The gradient of large groups: a last sweep over tiles, in the backward pass. See ``tiled_drift_triton``."""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import GRADIENT, address
from driftgen.drift.fused.far_clusters_triton import any_is_far, row_moments, row_radius
from driftgen.drift.fused.passes_triton import add_product
from driftgen.drift.fused.tiled_drift_triton import (
    add_differences,
    load_row_terms,
    load_sums,
    rounded,
    tile_affinity,
)
from driftgen.drift.fused.tiled_softmax_triton import rates_of, terms_size
from driftgen.drift.fused.tiles_triton import (
    column_distances,
    column_weights,
    count_tiles,
    is_centered,
    locate_tile,
    own_samples,
    row_tile,
    tile_at,
)

__all__ = ["combined_coefficients", "load_factors", "store_gradient", "tiled_gradient_kernel"]


@triton.jit
def _normalized(sums, inverse_norms, R: tl.constexpr):
    """Divide the sums of each temperature by λ_τ."""
    values = ()
    for r in tl.static_range(R):
        values = values + (sums[r] * tl.load(inverse_norms + r),)
    return values


@triton.jit
def load_factors(row_terms, inverse_norms, attraction, repulsion, N, i, R: tl.constexpr):
    """Factors of A in Σ_τ C_τ / λ_τ for each temperature: of repelling samples, and of attracting ones."""
    pushes = _normalized(load_sums(row_terms[2], -repulsion, N, i, R), inverse_norms, R)
    return pushes, _normalized(load_sums(row_terms[1], attraction, N, i, R), inverse_norms, R)


@triton.jit
def combined_coefficients(
    column, rows, row_terms, factors, problem, counts, group, weight, rates, terms, min_distance,
    self_distance, floor,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Σ_τ C_τ / λ_τ of a tile: its rounded value, its rounding error, the sum of each row of both, and, if
    distances are computed from differences, the moments of each row.
    """
    _, repelling, _ = count_tiles(counts, BM)
    distance, j, exists = column_distances(
        column, rows, problem, counts, min_distance, self_distance,
        CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
    )  # fmt: skip
    columns = j, exists, column_weights(weight, group, counts, j, exists, WEIGHTED)
    c = tl.zeros((BN, BM), tl.float32)
    for r in tl.static_range(R):
        a = tile_affinity(
            r, distance, row_terms, columns, terms, counts, rates, floor,
            WEIGHTED, RAGGED, KERNEL, BOTH, WEIGHTED_SOFTMAX,
        )  # fmt: skip
        c += tl.where(column < repelling, factors[0][r], factors[1][r])[:, None] * a
    high, value = rounded(c, WORK)
    low = high
    if tl.float32 != WORK:
        low, error = rounded(c - value, WORK)
        c = value + error
    moments = ()
    if DIRECT:
        moments = row_moments(c, distance, rows[3][:, None] == j[None, :])
    return high, low, tl.sum(c, axis=1), moments


@triton.jit
def store_gradient(
    out, drift, total, factor, k, rows, problem, counts, DIRECT: tl.constexpr, WORK: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store elements k to k + BD of the gradient from Σ C y and Σ C of each row."""
    x = own_samples(rows[0], rows[1], rows[2], k, problem, counts, DIRECT, WORK, BN, BD).to(tl.float32)
    drift = (drift - total[:, None] * x) * factor
    i, column = rows[3], k + tl.arange(0, BD)
    inside = (i < counts[0])[:, None] & (column < problem[4])[None, :]
    tl.store(out + i[:, None] * problem[3] + column[None, :], drift.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gradient_sweep(
    t, problem, counts, group, weight, rates, terms, inverse_norms, factor, out, min_distance,
    self_distance, floor, attraction, repulsion,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    row_terms = load_row_terms(terms, counts, rows[3], R)
    factors = load_factors(row_terms, inverse_norms, attraction, repulsion, counts[0], rows[3], R)
    _, _, tiles = count_tiles(counts, BM)
    total, drift = tl.zeros((BN,), tl.float32), tl.zeros((BN, BD), tl.float32)
    mass, moment = tl.zeros((BN,), tl.float32), tl.zeros((BN,), tl.float32)
    for column in range(0, tiles):
        high, low, row_total, moments = combined_coefficients(
            column, rows, row_terms, factors, problem, counts, group, weight, rates, terms, min_distance,
            self_distance, floor, CENTERED, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
            WEIGHTED_SOFTMAX, DK, BN, BM, BK,
        )  # fmt: skip
        samples, first, count, _ = tile_at(column, problem, counts, BM)
        y = own_samples(samples, first, count, 0, problem, counts, DIRECT, WORK, BM, BD)
        drift = add_product(drift, high, y)
        if tl.float32 != WORK:
            drift = add_product(drift, low, y)
        total += row_total
        if DIRECT:
            mass, moment = mass + moments[0], moment + moments[1]
    if DIRECT:
        x = own_samples(rows[0], rows[1], rows[2], 0, problem, counts, DIRECT, WORK, BN, BD)
        if any_is_far(row_radius(x), mass, moment):
            total, drift = tl.zeros((BN,), tl.float32), tl.zeros((BN, BD), tl.float32)
            for column in range(0, tiles):
                c, _, _, _ = combined_coefficients(
                    column, rows, row_terms, factors, problem, counts, group, weight, rates, terms,
                    min_distance, self_distance, floor, CENTERED, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R,
                    KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK,
                )  # fmt: skip
                samples, first, count, _ = tile_at(column, problem, counts, BM)
                drift = add_differences(drift, c, rows, samples, first, count, problem, BN, BM, BD)
    store_gradient(out, drift, total, factor, 0, rows, problem, counts, DIRECT, WORK, BN, BD)


@triton.jit(do_not_specialize=["by_group", "V"])
def tiled_gradient_kernel(
    origin, table, feature_of_vector, weight, units, norms, temperatures, sample_data, softmax_terms,
    upstream, by_group, V, N, M, P, width, min_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    R: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BN generated samples, upstream · factor · Σ_τ V_τ / λ_τ.

    BD coordinates hold whole samples.
    """
    counts = (N, M, P)
    tiles, _, _ = count_tiles(counts, BN)
    t, pid, group, feature, position, offset, problem = locate_tile(
        tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )
    unit = tl.load(units + position * 2).to(tl.float32)
    rates = rates_of(temperatures, unit, R)
    terms = softmax_terms + pid * terms_size(counts, R)
    norms += position * (1 + R)
    factor = tl.load(norms) * tl.load(upstream + group * by_group)
    out = address(origin, table, feature, GRADIENT) + offset
    if is_centered(problem, counts, DIRECT):
        _gradient_sweep(
            t, problem, counts, group, weight, rates, terms, norms + 1, factor, out, min_distance,
            self_distance * unit, floor, attraction, repulsion, not DIRECT, WORK, WEIGHTED, RAGGED, DIRECT,
            ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
        )  # fmt: skip
    else:
        _gradient_sweep(
            t, problem, counts, group, weight, rates, terms, norms + 1, factor, out, min_distance,
            self_distance * unit, floor, attraction, repulsion, False, WORK, WEIGHTED, RAGGED, DIRECT,
            ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
        )  # fmt: skip
