"""Products of drifts and gradient of large groups with wide vectors, by strips of coefficients.

A strip holds the coefficients of BN rows of one problem and all samples. Computing it takes an inner product
over the whole width; computing BD coordinates of the drift then takes products with the strip alone. Two
kernels share the work, one pair for the products and one for the gradient:

1. ``affinity_strips_kernel``, ``gradient_strips_kernel``: coefficients of one tile of BN rows and BM columns;
2. ``strip_products_kernel``, ``strip_gradient_kernel``: BD coordinates of the drift of BN rows.

The pair for the gradient is in ``strip_gradient_triton``.

Scratch memory holds a fixed number of strips, small enough to stay in the L2 cache. The launches take turns:
the first kernel fills the scratch memory, the second one reads it, and both go on with the next strips, from
number ``start`` on. So the scratch memory does not grow with the number of problems.

Scratch of a strip: coefficients ``[matrices, BN, columns]`` in the dtype of products, with the columns of
each set rounded up to BM; and partial sums of each row ``[column tiles, values, BN]`` in float32. The
matrices are the rounded A of each temperature; or the rounded value and the rounding error of Σ_τ C_τ / λ_τ.

Accuracy is that of ``tiled_drift_triton``: the sums of rounded coefficients are those of the same products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import load_rows
from driftgen.drift.fused.far_clusters_triton import any_is_far, row_moments, row_radius
from driftgen.drift.fused.passes_triton import add_product
from driftgen.drift.fused.tiled_drift_triton import (
    load_row_terms,
    moving,
    rounded,
    store_products,
    store_sums,
    tile_affinity,
    zero_drifts,
)
from driftgen.drift.fused.tiled_softmax_triton import rates_of, terms_size
from driftgen.drift.fused.tiles_triton import (
    column_distances,
    column_weights,
    count_tiles,
    is_centered,
    locate_tile_at,
    own_samples,
    row_tile,
)

__all__ = [
    "add_set",
    "add_sums",
    "affinity_strips_kernel",
    "part_radius",
    "store_tile",
    "strip_products_kernel",
]

AT_ONCE = tl.constexpr(16)  # column tiles whose partial sums are loaded at a time


@triton.jit
def store_tile(
    coefficients, matrix, number, MATRICES: tl.constexpr, slot, column, counts, BN: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Store a tile of one matrix of the strip in a slot of the scratch memory."""
    _, _, columns = count_tiles(counts, BM)
    i, j = tl.arange(0, BN), tl.arange(0, BM)
    row = coefficients + ((slot * MATRICES + number) * BN + i) * (columns * BM) + column * BM
    tl.store(row[:, None] + j[None, :], matrix)


@triton.jit
def _affinity_tile(
    t, slot, column, problem, counts, group, weight, rates, terms, coefficients, sums, min_distance,
    self_distance, floor,
    CENTERED: tl.constexpr, WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr,
    DIRECT: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, KERNEL: tl.constexpr,
    BOTH: tl.constexpr, MASKED: tl.constexpr, WEIGHTED_SOFTMAX: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    rows = row_tile(t, problem, counts, CENTERED, WORK, DIRECT, ONE, DK, BN, BK)
    row_terms = load_row_terms(terms, counts, rows[3], R)
    distance, j, exists = column_distances(
        column, rows, problem, counts, min_distance, self_distance,
        CENTERED, WORK, DIRECT, ONE, RAGGED, MASKED, DK, BN, BM, BK,
    )  # fmt: skip
    columns = j, exists, column_weights(weight, group, counts, j, exists, WEIGHTED)
    _, _, tiles = count_tiles(counts, BM)
    VALUES: tl.constexpr = 3 * R if DIRECT else 2 * R
    sums += (slot * tiles + column) * (VALUES * BN) + tl.arange(0, BN)
    for r in tl.static_range(R):
        a = tile_affinity(
            r, distance, row_terms, columns, terms, counts, rates, floor,
            WEIGHTED, RAGGED, KERNEL, BOTH, WEIGHTED_SOFTMAX,
        )  # fmt: skip
        c, value = rounded(a, WORK)
        store_tile(coefficients, c, r, R, slot, column, counts, BN, BM)
        tl.store(sums + r * BN, tl.sum(a, axis=1))
        tl.store(sums + (R + r) * BN, tl.sum(value, axis=1))
        if DIRECT:
            moment = row_moments(a, distance, rows[3][:, None] == j[None, :])[1]
            tl.store(sums + (2 * R + r) * BN, moment)


@triton.jit(do_not_specialize=["V", "strips"])
def affinity_strips_kernel(
    origin, table, feature_of_vector, weight, units, temperatures, sample_data, softmax_terms, start,
    coefficients, sums, strips, V, N, M, P, width, min_distance, self_distance, floor,
    WORK: tl.constexpr, WEIGHTED: tl.constexpr, RAGGED: tl.constexpr, DIRECT: tl.constexpr, ONE: tl.constexpr,
    R: tl.constexpr, KERNEL: tl.constexpr, BOTH: tl.constexpr, MASKED: tl.constexpr,
    WEIGHTED_SOFTMAX: tl.constexpr, DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write one tile of A for each temperature, and the sums of its rows: of A, of the rounded A, and, if
    distances are computed from differences, of A ‖y − x‖.
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
        if is_centered(problem, counts, DIRECT):
            _affinity_tile(
                t, slot, column, problem, counts, group, weight, rates, terms, coefficients, sums,
                min_distance, self_distance * unit, floor, not DIRECT, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R,
                KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK,
            )  # fmt: skip
        else:
            _affinity_tile(
                t, slot, column, problem, counts, group, weight, rates, terms, coefficients, sums,
                min_distance, self_distance * unit, floor, False, WORK, WEIGHTED, RAGGED, DIRECT, ONE, R,
                KERNEL, BOTH, MASKED, WEIGHTED_SOFTMAX, DK, BN, BM, BK,
            )  # fmt: skip


@triton.jit
def _add_samples(
    drifts, strip, row_size, samples, count, k, problem, counts, DIRECT: tl.constexpr, WORK: tl.constexpr,
    MATRICES: tl.constexpr, ONE_DRIFT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add the products of the matrices of a strip with one set, BK samples at a time, each to its own drift,
    or all to the only one (ONE_DRIFT). ``strip`` points to the column of the first sample of the set.
    """
    i, j = tl.arange(0, BN), tl.arange(0, BK)
    for first in range(0, count, BK):
        y = own_samples(samples, first, count, k, problem, counts, DIRECT, WORK, BK, BD)
        updated = ()
        for m in tl.static_range(MATRICES):
            c = tl.load(strip + (m * BN + i)[:, None] * row_size + (first + j)[None, :])
            if ONE_DRIFT:
                drifts = (add_product(drifts[0], c, y),)
            else:
                updated = updated + (add_product(drifts[m], c, y),)
        if not ONE_DRIFT:
            drifts = updated
    return drifts


@triton.jit
def _add_differences(
    drifts, strip, row_size, rows, samples, count, k, problem, MATRICES: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add Σ_j C_ij (y_j − x_i) over one set for each matrix of a strip, one sample at a time."""
    x = load_rows(rows[0], problem[3], rows[1], rows[2], problem[4], k, BN, BD).to(tl.float32)
    i, column = tl.arange(0, BN), k + tl.arange(0, BD)
    for j in range(count):
        y = tl.load(samples + j * problem[3] + column, mask=column < problem[4], other=0.0).to(tl.float32)
        difference, updated = y[None, :] - x, ()
        for m in tl.static_range(MATRICES):
            c = tl.load(strip + (m * BN + i) * row_size + j)
            updated = updated + (drifts[m] + c[:, None] * difference,)
        drifts = updated
    return drifts


@triton.jit
def add_set(
    drifts, strip, row_size, rows, samples, count, k, problem, counts, DIFFERENCES: tl.constexpr,
    DIRECT: tl.constexpr, WORK: tl.constexpr, MATRICES: tl.constexpr, ONE_DRIFT: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Add Σ C y over one set, or Σ C (y − x) if DIFFERENCES."""
    if DIFFERENCES:
        return _add_differences(drifts, strip, row_size, rows, samples, count, k, problem, MATRICES, BN, BD)
    else:
        return _add_samples(
            drifts, strip, row_size, samples, count, k, problem, counts, DIRECT, WORK, MATRICES, ONE_DRIFT,
            BN, BK, BD,
        )  # fmt: skip


@triton.jit
def part_radius(
    rows, k, problem, counts, DIRECT: tl.constexpr, WORK: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr
):
    """Distance of each row from the origin, if it is that of the BD coordinates from k on times the number of
    such parts.
    """
    x = own_samples(rows[0], rows[1], rows[2], k, problem, counts, DIRECT, WORK, BN, BD)
    return row_radius(x) * tl.sqrt(tl.cdiv(problem[4], BD).to(tl.float32))


@triton.jit
def add_sums(sums, begin, end, VALUES: tl.constexpr, BN: tl.constexpr):
    """Partial sums of the rows, added up over column tiles ``begin`` to ``end``."""
    totals, i = zero_drifts(VALUES, AT_ONCE, BN), tl.arange(0, BN)
    # Several tiles at a time: the loads of the next ones would wait for those of the last ones.
    for first in range(begin, end, AT_ONCE):
        column = first + tl.arange(0, AT_ONCE)
        updated = ()
        for v in tl.static_range(VALUES):
            at = sums + (column * VALUES + v)[:, None] * BN + i[None, :]
            updated = updated + (totals[v] + tl.load(at, mask=(column < end)[:, None], other=0.0),)
        totals = updated
    of_rows = ()
    for v in tl.static_range(VALUES):
        of_rows = of_rows + (tl.sum(totals[v], axis=0),)
    return of_rows


@triton.jit
def _strip_products(
    out, coefficients, row_size, rows, row_terms, of_repelling, of_attracting, k, problem, counts,
    attraction, repulsion, DIFFERENCES: tl.constexpr, DIRECT: tl.constexpr, WORK: tl.constexpr,
    R: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BK_NEG: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    N, M, P = counts
    generated, repelling, _ = count_tiles(counts, BM)
    drifts = add_set(
        zero_drifts(R, BN, BD), coefficients, row_size, rows, problem[0], N, k, problem, counts, DIFFERENCES,
        DIRECT, WORK, R, False, BN, BK, BD,
    )  # fmt: skip
    drifts = add_set(
        drifts, coefficients + generated * BM, row_size, rows, problem[1], M, k, problem, counts, DIFFERENCES,
        DIRECT, WORK, R, False, BN, BK_NEG, BD,
    )  # fmt: skip
    scaled, totals, scales = (), (), ()
    for r in tl.static_range(R):
        push, pull = -repulsion * of_attracting[r], attraction * of_repelling[r]
        # If S⁻ is 0, so is B⁻, and the row does not drift. Without attraction, V = −repulsion · S⁺ · B⁻.
        drifting = moving(row_terms, r, rows[3], N)
        divides = drifting & (tl.abs(pull) > 1e-20 * tl.abs(push))
        ratio = tl.where(divides, push / tl.where(divides, pull, 1.0), 0.0)
        scale = tl.where(divides, pull, 0.0)
        ratio = tl.where(attraction == 0, push, ratio)
        scale = tl.where(attraction == 0, tl.where(drifting, 1.0, 0.0), scale)
        total = ratio * of_repelling[R + r] + tl.where(attraction == 0, 0.0, of_attracting[R + r])
        scaled = scaled + (drifts[r] * ratio[:, None],)
        totals = totals + (total,)
        scales = scales + (scale,)
    positives = tl.where(attraction == 0, 0, P)
    drifts = add_set(
        scaled, coefficients + repelling * BM, row_size, rows, problem[2], positives, k, problem, counts,
        DIFFERENCES, DIRECT, WORK, R, False, BN, BK, BD,
    )  # fmt: skip
    values = ()
    if DIFFERENCES:
        for r in tl.static_range(R):
            values = values + (drifts[r] * scales[r][:, None],)
    else:
        x = own_samples(rows[0], rows[1], rows[2], k, problem, counts, DIRECT, WORK, BN, BD).to(tl.float32)
        for r in tl.static_range(R):
            values = values + ((drifts[r] - totals[r][:, None] * x) * scales[r][:, None],)
    store_products(out, values, R)


@triton.jit(do_not_specialize=["V", "strips"])
def strip_products_kernel(
    origin, table, feature_of_vector, sample_data, start, coefficients, sums, products, softmax_terms,
    strips, V, N, M, P, width, attraction, repulsion,
    WORK: tl.constexpr, DIRECT: tl.constexpr, R: tl.constexpr,
    DK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BK_NEG: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """Products ⟨V_τ, V_τ'⟩ of the rows of a strip and BD coordinates for τ ≤ τ', in the units of the samples.
    Stores S⁻ and S⁺. Samples are multiplied BK at a time, negatives BK_NEG.

    ``products`` is ``[problems, tiles, parts, R, R]``. With B = Σ A (y − x) over repelling or attracting
    samples, V = attraction · S⁻ · B⁺ − repulsion · S⁺ · B⁻. One sum of products holds
    V / (attraction · S⁻) = B⁺ + ratio · B⁻.
    """
    counts, parts = (N, M, P), tl.cdiv(width, BD)
    tiles = count_tiles(counts, BN)[0]
    repelling, columns = count_tiles(counts, BM)[1], count_tiles(counts, BM)[2]
    slot, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    strip, k = tl.load(start) + slot, part * BD
    if strip < strips:
        t, pid, _, _, _, _, problem = locate_tile_at(
            strip, tiles, origin, table, feature_of_vector, sample_data, V, counts, width, DK, DIRECT
        )
        rows = row_tile(t, problem, counts, False, WORK, True, False, DK, BN, BK)
        row_terms = load_row_terms(softmax_terms + pid * terms_size(counts, R), counts, rows[3], R)
        VALUES: tl.constexpr = 3 * R if DIRECT else 2 * R
        sums += slot * columns * (VALUES * BN)
        # S, the sums of the rounded A, and those of A ‖y − x‖, for each temperature.
        of_repelling = add_sums(sums, 0, repelling, VALUES, BN)
        of_attracting = add_sums(sums, repelling, columns, VALUES, BN)
        if part == 0:
            store_sums(row_terms[1], of_repelling, row_terms, N, rows[3], R)
            store_sums(row_terms[2], of_attracting, row_terms, N, rows[3], R)
        row_size = columns * BM
        coefficients += slot * (R * BN) * row_size
        out = products + (strip * parts + part) * (R * R)
        if DIRECT:
            radius, far = part_radius(rows, k, problem, counts, DIRECT, WORK, BN, BD), False
            for r in tl.static_range(R):
                far = far | any_is_far(radius, of_repelling[r], of_repelling[2 * R + r])
                far = far | any_is_far(radius, of_attracting[r], of_attracting[2 * R + r])
            if far:
                _strip_products(
                    out, coefficients, row_size, rows, row_terms, of_repelling, of_attracting, k, problem,
                    counts, attraction, repulsion, True, DIRECT, WORK, R, BN, BM, BK, BK_NEG, BD,
                )  # fmt: skip
            else:
                _strip_products(
                    out, coefficients, row_size, rows, row_terms, of_repelling, of_attracting, k, problem,
                    counts, attraction, repulsion, False, DIRECT, WORK, R, BN, BM, BK, BK_NEG, BD,
                )  # fmt: skip
        else:
            _strip_products(
                out, coefficients, row_size, rows, row_terms, of_repelling, of_attracting, k, problem,
                counts, attraction, repulsion, False, DIRECT, WORK, R, BN, BM, BK, BK_NEG, BD,
            )  # fmt: skip
