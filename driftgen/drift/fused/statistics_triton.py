"""Statistics between the passes as kernels: a few values for each feature, from sums over all its problems.

``drift/statistics.py`` takes about sixty small operations for the same arithmetic, whose launches would take
longer than a small loss.

``scale_statistics`` and ``drift_statistics`` have two stages. SUM adds up the problems of a feature. FINISH
turns the sums into statistics. One launch does both, unless sums have to be all-reduced or statistics are
given: then each stage is a launch, and the sums are in memory between them.

Values of a feature: its units ``[F, 2]`` in float64, S √D of distances and S of coordinates; ``norms``
``[F, 1 + R]``, the factor of its gradient and 1/λ_τ; ``loss_terms`` ``[F, 1 + R²]`` in float64, its loss and
the weight of each product ⟨V_τ, V_τ'⟩ in the loss of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import (
    FIELDS,
    FIRST,
    GENERATED,
    GRADIENT,
    GROUP_STRIDE,
    NEGATIVES,
    POSITION,
    POSITIVES,
    VECTORS,
)

__all__ = ["drift_statistics", "group_statistics", "scale_statistics", "table_row"]


@triton.jit(
    do_not_specialize=[
        "generated", "negatives", "positives", "gradient", "vectors", "first", "generated_stride",
        "negatives_stride", "positives_stride", "position",
    ]
)  # fmt: skip
def table_row(
    row, generated: tl.int64, negatives: tl.int64, positives: tl.int64, gradient: tl.int64,
    vectors: tl.int64, first: tl.int64, generated_stride: tl.int64, negatives_stride: tl.int64,
    positives_stride: tl.int64, position: tl.int64,
):  # fmt: skip
    """Write one row of the feature table from launch arguments."""
    tl.store(row + GENERATED, generated)
    tl.store(row + NEGATIVES, negatives)
    tl.store(row + POSITIVES, positives)
    tl.store(row + GRADIENT, gradient)
    tl.store(row + VECTORS, vectors)
    tl.store(row + FIRST, first)
    tl.store(row + GROUP_STRIDE, generated_stride)
    tl.store(row + GROUP_STRIDE + 1, negatives_stride)
    tl.store(row + GROUP_STRIDE + 2, positives_stride)
    tl.store(row + POSITION, position)


@triton.jit
def _feature(table):
    """Number of vectors of this program's feature, its first vector, and its position in the call."""
    row = table + tl.program_id(0) * FIELDS
    # 32-bit integers are five times as fast to divide by.
    return tl.load(row + VECTORS).to(tl.int32), tl.load(row + FIRST).to(tl.int32), tl.load(row + POSITION)


@triton.jit
def _at_least(value, least, instead):
    """Clamp to ``least``; without such a bound, replace 0 by ``instead``."""
    return tl.where(least > 0, tl.maximum(value, least), tl.where(value > 0, value, instead))


@triton.jit(do_not_specialize=["groups", "V", "N", "pairs", "width"])
def scale_statistics(
    problem_sums, table, weight_sum, sums, given_scale, scales, units, groups, V, N, pairs, width, min_scale,
    SUM: tl.constexpr, FINISH: tl.constexpr, GIVEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale = Σ w ‖x − y‖ / Σ w, and the units that follow from it.

    ``sums``, ``[F, 3]``: Σ w ‖x − y‖, Σ w, groups.
    """
    vectors, first, position = _feature(table)
    if SUM:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, groups * vectors, BLOCK):
            i = start + tl.arange(0, BLOCK)
            problem = (i // vectors) * V + first + i % vectors
            total += tl.load(problem_sums + problem, mask=i < groups * vectors, other=0.0).to(tl.float64)
        distance_sum = tl.sum(total, axis=0)
        per_sample = tl.load(weight_sum).to(tl.float64) if WEIGHTED else pairs.to(tl.float64)
        count = per_sample * (N * vectors).to(tl.float64)
    else:
        distance_sum, count = tl.load(sums + position * 3), tl.load(sums + position * 3 + 1)
    if FINISH:
        scale = tl.where(count > 0, distance_sum / count, 0.0)
        tl.store(scales + position, scale.to(tl.float32))
        if GIVEN:
            scale = tl.load(given_scale + position)
        unit = _at_least(scale / tl.sqrt(width.to(tl.float64)), min_scale, 1.0)
        tl.store(units + position * 2, _at_least(scale, min_scale, 1.0))
        tl.store(units + position * 2 + 1, unit)
    else:
        tl.store(sums + position * 3, distance_sum)
        tl.store(sums + position * 3 + 1, count)
        tl.store(sums + position * 3 + 2, groups.to(tl.float64))


@triton.jit(do_not_specialize=["groups", "V", "N", "width"])
def drift_statistics(
    products, table, units, scale_sums, sums, given_drift, drifts, norms, loss_terms,
    groups, V, N, width, min_drift,
    SUM: tl.constexpr, FINISH: tl.constexpr, GIVEN: tl.constexpr,
    NORMALIZE: tl.constexpr, SUM_VECTORS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Drift E[‖V_τ‖² / D], norms λ_τ, the loss of the feature, and the factors of its gradient and products.

    ``sums``, ``[F, R, R]``: Σ ⟨V_τ, V_τ'⟩ in units of S².
    """
    vectors, first, position = _feature(table)
    unit = tl.load(units + position * 2 + 1)
    if SUM:
        totals = ()
        for _ in tl.static_range(R * (R + 1) // 2):
            totals = totals + (tl.zeros((BLOCK,), tl.float64),)
        for start in range(0, groups * vectors, BLOCK):
            i = start + tl.arange(0, BLOCK)
            problem = ((i // vectors) * V + first + i % vectors).to(tl.int64)
            updated = ()
            for r in tl.static_range(R):
                for s in tl.static_range(r, R):
                    at = products + problem * (R * R) + r * R + s
                    value = tl.load(at, mask=i < groups * vectors, other=0.0).to(tl.float64)
                    updated = updated + (totals[r * R - r * (r + 1) // 2 + s] + value,)
            totals = updated
    if FINISH:
        all_groups = groups.to(tl.float64) if SUM else tl.load(scale_sums + position * 3 + 2)
        count = all_groups * (N * vectors).to(tl.float64) * width.to(tl.float64)
        means = ()
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                if SUM:
                    total = tl.sum(totals[r * R - r * (r + 1) // 2 + s], axis=0)
                    means = means + (total / (count * unit * unit),)
                else:
                    means = means + (tl.load(sums + position * (R * R) + r * R + s) / count,)
        inverse = ()
        for r in tl.static_range(R):
            squared = means[r * R - r * (r + 1) // 2 + r]
            tl.store(drifts + position * R + r, squared.to(tl.float32))
            if GIVEN:
                squared = tl.load(given_drift + position * R + r)
            norm = _at_least(squared, min_drift, float("inf")) if NORMALIZE else squared * 0.0 + 1.0
            norm = 1.0 / tl.sqrt(norm)
            tl.store(norms + position * (1 + R) + 1 + r, norm.to(tl.float32))
            inverse = inverse + (norm,)
        factor = vectors.to(tl.float64) if SUM_VECTORS else 1.0
        share = factor / ((vectors * N).to(tl.float64) * width.to(tl.float64))
        terms = loss_terms + position * (1 + R * R)
        loss = unit * 0.0
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                weight = inverse[r] * inverse[s] * (1.0 if r == s else 2.0)
                loss += weight * means[r * R - r * (r + 1) // 2 + s]
                tl.store(terms + 1 + r * R + s, weight * share / (unit * unit))
        tl.store(terms, loss * factor)
        gradient_factor = -2 * share / (unit * unit * all_groups)
        tl.store(norms + position * (1 + R), gradient_factor.to(tl.float32))
    else:
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                total = tl.sum(totals[r * R - r * (r + 1) // 2 + s], axis=0) / (unit * unit)
                tl.store(sums + position * (R * R) + r * R + s, total)
                tl.store(sums + position * (R * R) + s * R + r, total)


@triton.jit(do_not_specialize=["V", "features"])
def group_statistics(
    products, table, feature_of_vector, loss_terms, per_group, loss, V, features,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Loss of each group, Σ ⟨V_τ, V_τ'⟩ / (λ_τ λ_τ') over all vectors and features of one width, and the sum
    of the losses of all features.
    """
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        inside = v < V
        feature = tl.load(feature_of_vector + v, mask=inside, other=0)
        position = tl.load(table + feature * FIELDS + POSITION, mask=inside, other=0)
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                term = loss_terms + position * (1 + R * R) + 1 + r * R + s
                weight = tl.load(term, mask=inside, other=0.0)
                at = products + (group * V + v) * (R * R) + r * R + s
                total += weight * tl.load(at, mask=inside, other=0.0).to(tl.float64)
    tl.store(per_group + group, tl.sum(total, axis=0).to(per_group.dtype.element_ty))
    if group == 0:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, features, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += tl.load(loss_terms + i * (1 + R * R), mask=i < features, other=0.0)
        tl.store(loss, tl.sum(total, axis=0).to(tl.float32))
