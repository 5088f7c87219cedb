"""The last sweeps over the tiles of large groups: products of drifts, and the gradient.

One program computes BN rows of one problem, as in ``tiled_softmax_triton``, for all coordinates of the drift:

1. ``tiled_products_kernel``: V_τ, and the products ⟨V_τ, V_τ'⟩. S⁻ and S⁺, the sums of A over repelling and
   attracting samples, are factors of whole rows: the kernel sums A y over both kinds of samples separately;
2. ``tiled_gradient_kernel``: Σ_τ V_τ / λ_τ.

The drifts of wide vectors do not fit the registers: the kernels of ``strips_triton`` compute them.

Accuracy is that of ``passes_triton``. V_i = Σ_j C_ij y_j − x_i Σ_j C_ij, with the rounded C in both terms, so
that rounding errors scale with differences of samples. The gradient splits each C_ij into a rounded value and
its rounding error. The products do not: they are off by up to twice the unit roundoff (2⁻⁷ for bfloat16) if
all C_ij of a row round the same way, as those of an outlier do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.affinities_triton import PADDED, log2_quotient
from driftgen.drift.fused.distances_triton import load_coordinate
from driftgen.drift.fused.far_clusters_triton import (
    any_is_far,
    in_column,
    row_moments,
    row_radius,
    tile_coordinate,
)
from driftgen.drift.fused.passes_triton import add_product
from driftgen.drift.fused.tiled_softmax_triton import rates_of, terms_size, zero_sums
from driftgen.drift.fused.tiles_triton import (
    column_distances,
    column_weights,
    count_tiles,
    is_centered,
    load_columns,
    locate_tile,
    own_samples,
    row_tile,
    tile_at,
)

__all__ = [
    "add_differences",
    "load_row_terms",
    "load_sums",
    "moving",
    "rounded",
    "store_products",
    "store_sums",
    "tile_affinity",
    "tiled_products_kernel",
    "zero_drifts",
]


@triton.jit
def load_row_terms(terms, counts, i, R: tl.constexpr):
    """Logarithms of the factors of the rows of A, and pointers to S⁻ and S⁺."""
    N, by_row = counts[0], ()
    terms += (N + counts[1] + counts[2]) * R
    for r in tl.static_range(R):
        by_row = by_row + (tl.load(terms + N * r + i, mask=i < N, other=-PADDED),)
    return by_row, terms + N * R, terms + N * (2 * R)


@triton.jit
def load_sums(sums, factor, N, i, R: tl.constexpr):
    """S⁻ or S⁺ of the rows for each temperature, times a factor."""
    values = ()
    for r in tl.static_range(R):
        values = values + (factor * tl.load(sums + N * r + i, mask=i < N, other=0.0),)
    return values


@triton.jit
def moving(row_terms, r: tl.constexpr, i, N):
    """Mask of the rows that drift: generated samples for which some sample has weight."""
    return (i < N) & (row_terms[0][r] > -0.5 * PADDED)


@triton.jit
def store_sums(sums, values, row_terms, N, i, R: tl.constexpr):
    """Store S⁻ or S⁺, 0 in rows that do not drift."""
    for r in tl.static_range(R):
        tl.store(sums + N * r + i, tl.where(moving(row_terms, r, i, N), values[r], 0.0), mask=i < N)


@triton.jit
def tile_affinity(
    r: tl.constexpr, distance, row_terms, columns, terms, counts, rates, floor,
    WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr,
):  # fmt: skip
    """A of a tile at one temperature, 0 for samples that do not exist. ``columns`` are the numbers of the
    samples of the tile, a mask of those that exist, and their weights.
    """
    least = floor
    if RAGGED and not WEIGHTED:
        # The distance of padded samples is PADDED: without a floor, their affinity is 0.
        least = tl.where(columns[1], floor, 0.0)[None, :]
    exponent = log2_quotient(distance, -row_terms[0][r][:, None], rates[r], KERNEL)
    if BOTH:
        T = counts[0] + counts[1] + counts[2]
        exponent += load_columns(terms + T * r + columns[0], columns[1], RAGGED)[None, :]
    if WEIGHTED_SOFTMAX:
        exponent = tl.minimum(exponent, 60.0)  # only samples without weight exceed it
    a = tl.maximum(tl.exp2(exponent), least)
    return a * columns[2][None, :] if WEIGHTED else a


@triton.jit
def rounded(value, WORK: tl.constexpr):
    """Round to the dtype of products. Returns the result in this dtype and in float32."""
    if tl.bfloat16 == WORK:
        # By integers, half away from zero: conversions of pairs are cheap, but if the results are converted
        # back, the compiler converts single numbers, each of which takes as long as an exponential.
        bits = (value.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
        value = bits.to(tl.float32, bitcast=True)
        return value.to(WORK), value
    else:
        result = value.to(WORK)
        return result, result.to(tl.float32)


@triton.jit
def zero_drifts(R: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr):
    values = ()
    for _ in tl.static_range(R):
        values = values + (tl.zeros((BN, BD), tl.float32),)
    return values


@triton.jit
def _sum_differences(
    begin, end, rows, row_terms, problem, counts, group, weight, rates, terms,
    min_distance, self_distance, floor,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Σ A (y − x) of each row and temperature over tiles ``begin`` to ``end``, from differences."""
    drifts = zero_drifts(R, BN, BD)
    for column in range(begin, end):
        distance, j, exists = column_distances(
            column, rows, problem, counts, min_distance, self_distance,
            CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
        )  # fmt: skip
        columns = j, exists, column_weights(weight, group, counts, j, exists, WEIGHTED)
        samples, first, count, _ = tile_at(column, problem, counts, BM)
        next_drifts = ()
        for r in tl.static_range(R):
            a = tile_affinity(
                r, distance, row_terms, columns, terms, counts, rates, floor,
                WEIGHTED, RAGGED, KERNEL, BOTH, WEIGHTED_SOFTMAX,
            )  # fmt: skip
            next_drifts = next_drifts + (
                add_differences(drifts[r], a, rows, samples, first, count, problem, BN, BM, BD),
            )
        drifts = next_drifts
    return drifts


@triton.jit
def add_differences(
    drift, c, rows, samples, first, count, problem, BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr
):
    """drift + Σ_j C_ij (y_j − x_i) of a tile, one coordinate at a time."""
    for k in range(problem[4]):
        x = load_coordinate(rows[0], problem[3], rows[1], rows[2], k, BN)
        drift += in_column(tile_coordinate(c, x, samples, problem[3], first, count, k, BM), k, BD)
    return drift


@triton.jit
def _sum_samples(
    begin, end, rows, row_terms, problem, counts, group, weight, rates, terms,
    min_distance, self_distance, floor,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Σ A, Σ C and Σ C y of each row and temperature over tiles ``begin`` to ``end``. C is the rounded A.

    For clusters that are far apart, Σ C y is relative to the row, and Σ C is 0.
    """
    sums, totals, drifts = zero_sums(R, BN), zero_sums(R, BN), zero_drifts(R, BN, BD)
    moments = zero_sums(R, BN)
    for column in range(begin, end):
        distance, j, exists = column_distances(
            column, rows, problem, counts, min_distance, self_distance,
            CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
        )  # fmt: skip
        columns = j, exists, column_weights(weight, group, counts, j, exists, WEIGHTED)
        samples, first, count, _ = tile_at(column, problem, counts, BM)
        y = own_samples(samples, first, count, 0, problem, counts, DIRECT, WORK, BM, BD)
        next_sums, next_totals, next_drifts, next_moments = (), (), (), ()
        for r in tl.static_range(R):
            a = tile_affinity(
                r, distance, row_terms, columns, terms, counts, rates, floor,
                WEIGHTED, RAGGED, KERNEL, BOTH, WEIGHTED_SOFTMAX,
            )  # fmt: skip
            next_sums = next_sums + (sums[r] + tl.sum(a, axis=1),)
            c, value = rounded(a, WORK)
            next_totals = next_totals + (totals[r] + tl.sum(value, axis=1),)
            next_drifts = next_drifts + (add_product(drifts[r], c, y),)
            if DIRECT:
                moment = row_moments(a, distance, rows[3][:, None] == j[None, :])[1]
                next_moments = next_moments + (moments[r] + moment,)
        sums, totals, drifts = next_sums, next_totals, next_drifts
        if DIRECT:
            moments = next_moments
    if DIRECT:
        x = own_samples(rows[0], rows[1], rows[2], 0, problem, counts, DIRECT, WORK, BN, BD)
        radius, far = row_radius(x), False
        for r in tl.static_range(R):
            far = far | any_is_far(radius, sums[r], moments[r])
        if far:
            totals = zero_sums(R, BN)
            drifts = _sum_differences(
                begin, end, rows, row_terms, problem, counts, group, weight, rates, terms, min_distance,
                self_distance, floor, CENTERED, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
                WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
            )  # fmt: skip
    return sums, totals, drifts


@triton.jit
def store_products(out, drifts, R: tl.constexpr):
    """Store ⟨V_τ, V_τ'⟩ for τ ≤ τ'."""
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            product = tl.sum(tl.sum(drifts[r] * drifts[s], axis=1), axis=0)
            tl.store(out + r * R + s, product)


@triton.jit
def _products_sweep(
    t, problem, counts, group, weight, rates, terms, out, min_distance, self_distance, floor,
    attraction, repulsion,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    N = counts[0]
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    row_terms = load_row_terms(terms, counts, rows[3], R)
    _, repelling, tiles = count_tiles(counts, BM)
    repelled, totals, drifts = _sum_samples(
        0, repelling, rows, row_terms, problem, counts, group, weight, rates, terms, min_distance,
        self_distance, floor, CENTERED, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
        WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
    )  # fmt: skip
    attracted, positive_totals, positive_drifts = _sum_samples(
        repelling, tiles, rows, row_terms, problem, counts, group, weight, rates, terms, min_distance,
        self_distance, floor, CENTERED, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
        WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
    )  # fmt: skip
    x = own_samples(rows[0], rows[1], rows[2], 0, problem, counts, DIRECT, WORK, BN, BD).to(tl.float32)
    values = ()
    for r in tl.static_range(R):
        repelling_drift = drifts[r] - totals[r][:, None] * x
        attracting_drift = positive_drifts[r] - positive_totals[r][:, None] * x
        drift = (-repulsion * attracted[r])[:, None] * repelling_drift
        drift += (attraction * repelled[r])[:, None] * attracting_drift
        values = values + (tl.where(moving(row_terms, r, rows[3], N)[:, None], drift, 0.0),)
    store_sums(row_terms[1], repelled, row_terms, N, rows[3], R)
    store_sums(row_terms[2], attracted, row_terms, N, rows[3], R)
    store_products(out, values, R)


@triton.jit(do_not_specialize=["V"])
def tiled_products_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, sample_data, products, softmax_terms,
    V, N, M, P, width, min_distance, self_distance, floor, attraction, repulsion,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    R: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Products ⟨V_τ, V_τ'⟩ of each tile of rows for τ ≤ τ', in the units of the samples. Stores S⁻ and S⁺.

    ``products`` is ``[problems, tiles, R, R]``. V and C are those of ``passes_triton``. BD coordinates hold
    whole samples.
    """
    counts = (N, M, P)
    tiles, _, _ = count_tiles(counts, BN)
    t, pid, group, _, position, _, problem = locate_tile(
        tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
    )
    out = products + (pid * tiles + t) * (R * R)
    unit = tl.load(units + position * 2).to(tl.float32)
    rates = rates_of(temperatures, unit, R)
    terms = softmax_terms + pid * terms_size(counts, R)
    if is_centered(problem, counts, DIRECT):
        _products_sweep(
            t, problem, counts, group, weight, rates, terms, out, min_distance, self_distance * unit, floor,
            attraction, repulsion, not DIRECT, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
            WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
        )  # fmt: skip
    else:
        _products_sweep(
            t, problem, counts, group, weight, rates, terms, out, min_distance, self_distance * unit, floor,
            attraction, repulsion, False, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R, KERNEL, BOTH, MASKED,
            WEIGHTED_SOFTMAX, DK, BN, BM, BK, BD,
        )  # fmt: skip
