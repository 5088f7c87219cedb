"""The gradient of large groups with wide vectors, by strips of coefficients. See ``strips_triton``."""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import GRADIENT, address
from driftgen.drift.fused.far_clusters_triton import any_is_far
from driftgen.drift.fused.strips_triton import add_set, add_sums, part_radius, store_tile
from driftgen.drift.fused.tiled_drift_triton import load_row_terms
from driftgen.drift.fused.tiled_gradient_triton import combined_coefficients, load_factors, store_gradient
from driftgen.drift.fused.tiled_softmax_triton import rates_of, terms_size
from driftgen.drift.fused.tiles_triton import count_tiles, is_centered, locate_tile_at, row_tile

__all__ = ["gradient_strips_kernel", "strip_gradient_kernel"]


@triton.jit
def _gradient_tile(
    t, slot, column, problem, counts, group, weight, rates, terms, inverse_norms, coefficients, sums,
    min_distance, self_distance, floor, attraction, repulsion,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr, MATRICES: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    row_terms = load_row_terms(terms, counts, rows[3], R)
    factors = load_factors(row_terms, inverse_norms, attraction, repulsion, counts[0], rows[3], R)
    high, low, total, moments = combined_coefficients(
        column, rows, row_terms, factors, problem, counts, group, weight, rates, terms, min_distance,
        self_distance, floor, CENTERED, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
        WEIGHTED_SOFTMAX, DK, BN, BM, BK,
    )  # fmt: skip
    store_tile(coefficients, high, 0, MATRICES, slot, column, counts, BN, BM)
    if MATRICES == 2:
        store_tile(coefficients, low, 1, MATRICES, slot, column, counts, BN, BM)
    _, _, tiles = count_tiles(counts, BM)
    VALUES: tl.constexpr = 3 if DIRECT else 1
    sums += (slot * tiles + column) * (VALUES * BN) + tl.arange(0, BN)
    tl.store(sums, total)
    if DIRECT:
        tl.store(sums + BN, moments[0])
        tl.store(sums + 2 * BN, moments[1])


@triton.jit(do_not_specialize=["V", "strips"])
def gradient_strips_kernel(
    origin, table, feature_of_vector, weight, units, norms, temperatures, sample_data, softmax_terms, start,
    coefficients, sums, strips, V, N, M, P, width, min_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    R: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr, MATRICES: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write one tile of Σ_τ C_τ / λ_τ, the sums of its rows, and, if distances are computed from differences,
    their moments.
    """
    counts = (N, M, P)
    tiles, columns = count_tiles(counts, BN)[0], count_tiles(counts, BM)[2]
    slot, column = (tl.program_id(0) // columns).to(tl.int64), tl.program_id(0) % columns
    strip = tl.load(start) + slot
    if strip < strips:
        t, pid, group, _, position, _, problem = locate_tile_at(
            strip, tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
        )
        unit = tl.load(units + position * 2).to(tl.float32)
        rates = rates_of(temperatures, unit, R)
        terms = softmax_terms + pid * terms_size(counts, R)
        inverse_norms = norms + position * (1 + R) + 1
        if is_centered(problem, counts, DIRECT):
            _gradient_tile(
                t, slot, column, problem, counts, group, weight, rates, terms, inverse_norms, coefficients,
                sums, min_distance, self_distance * unit, floor, attraction, repulsion, not DIRECT, WORK,
                WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, MATRICES, DK, BN,
                BM, BK,
            )  # fmt: skip
        else:
            _gradient_tile(
                t, slot, column, problem, counts, group, weight, rates, terms, inverse_norms, coefficients,
                sums, min_distance, self_distance * unit, floor, attraction, repulsion, False, WORK,
                WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, MATRICES, DK, BN,
                BM, BK,
            )  # fmt: skip


@triton.jit
def _strip_gradient(
    out, coefficients, row_size, rows, total, factor, k, problem, counts, DIFFERENCES: tl.constexpr,
    DIRECT: tl.constexpr, WORK: tl.constexpr, MATRICES: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BK_NEG: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    N, M, P = counts
    generated, repelling, _ = count_tiles(counts, BM)
    drift = (tl.zeros((BN, BD), tl.float32),)
    drift = add_set(
        drift, coefficients, row_size, rows, problem[0], N, k, problem, counts, DIFFERENCES, DIRECT, WORK,
        MATRICES, True, BN, BK, BD,
    )  # fmt: skip
    drift = add_set(
        drift, coefficients + generated * BM, row_size, rows, problem[1], M, k, problem, counts, DIFFERENCES,
        DIRECT, WORK, MATRICES, True, BN, BK_NEG, BD,
    )  # fmt: skip
    drift = add_set(
        drift, coefficients + repelling * BM, row_size, rows, problem[2], P, k, problem, counts, DIFFERENCES,
        DIRECT, WORK, MATRICES, True, BN, BK, BD,
    )  # fmt: skip
    store_gradient(out, drift[0], total, factor, k, rows, problem, counts, DIRECT, WORK, BN, BD)


@triton.jit(do_not_specialize=["by_group", "V", "strips"])
def strip_gradient_kernel(
    origin, table, feature_of_vector, norms, sample_data, upstream, start, coefficients, sums,
    by_group, strips, V, N, M, P, width,
    WORK: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr, MATRICES: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BK_NEG: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Write BD coordinates of the gradient of the rows of a strip, upstream · factor · Σ_τ V_τ / λ_τ."""
    counts, parts = (N, M, P), tl.cdiv(width, BD)
    tiles = count_tiles(counts, BN)[0]
    columns = count_tiles(counts, BM)[2]
    slot, k = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts * BD
    strip = tl.load(start) + slot
    if strip < strips:
        t, _, group, feature, position, offset, problem = locate_tile_at(
            strip, tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
        )
        rows = row_tile(t, problem, counts, False, WORK, True, False, DK, BN, BK)
        VALUES: tl.constexpr = 3 if DIRECT else 1
        totals = add_sums(sums + slot * columns * (VALUES * BN), 0, columns, VALUES, BN)
        row_size = columns * BM
        coefficients += slot * (MATRICES * BN) * row_size
        factor = tl.load(norms + position * (1 + R)) * tl.load(upstream + group * by_group)
        out = address(origin, table, feature, GRADIENT) + offset
        if DIRECT:
            radius = part_radius(rows, k, problem, counts, DIRECT, WORK, BN, BD)
            if any_is_far(radius, totals[1], totals[2]):
                zero = tl.zeros((BN,), tl.float32)
                _strip_gradient(
                    out, coefficients, row_size, rows, zero, factor, k, problem, counts,
                    True, DIRECT, WORK, MATRICES, BN, BM, BK, BK_NEG, BD,
                )  # fmt: skip
            else:
                _strip_gradient(
                    out, coefficients, row_size, rows, totals[0], factor, k, problem, counts,
                    False, DIRECT, WORK, MATRICES, BN, BM, BK, BK_NEG, BD,
                )  # fmt: skip
        else:
            _strip_gradient(
                out, coefficients, row_size, rows, totals[0], factor, k, problem, counts,
                False, DIRECT, WORK, MATRICES, BN, BM, BK, BK_NEG, BD,
            )  # fmt: skip
