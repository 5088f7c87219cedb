"""What lies between the passes, as kernels: a few numbers for each feature, from sums over all its problems.

PyTorch does the same in some sixty small operations (``drift.passes``), whose launches would take longer
than a small loss.

The numbers of a feature, ``[F, 3 + 2 R]``: its scale, the unit of distances, the factor of its gradient, its
drift at each temperature, and 1/λ of each. In float64, ``[F, 1 + R²]``: the unit of drifts, and the weight of
each product ⟨V_τ, V_τ'⟩ in the loss of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.distances_triton import (
    APART,
    FIELDS,
    FIRST,
    GENERATED,
    GRADIENT,
    NEGATIVES,
    POSITION,
    POSITIVES,
    VECTORS,
)

__all__ = ["drift_statistics", "group_statistics", "scale_statistics", "table_row"]


@triton.jit(
    do_not_specialize=[
        "generated", "negatives", "positives", "gradient", "vectors", "first", "apart", "negatives_apart",
        "positives_apart", "position",
    ]
)  # fmt: skip
def table_row(
    row, generated: tl.int64, negatives: tl.int64, positives: tl.int64, gradient: tl.int64,
    vectors: tl.int64, first: tl.int64, apart: tl.int64, negatives_apart: tl.int64,
    positives_apart: tl.int64, position: tl.int64,
):  # fmt: skip
    """One row of the table that says where a feature lies, from numbers that go with the launch."""
    tl.store(row + GENERATED, generated)
    tl.store(row + NEGATIVES, negatives)
    tl.store(row + POSITIVES, positives)
    tl.store(row + GRADIENT, gradient)
    tl.store(row + VECTORS, vectors)
    tl.store(row + FIRST, first)
    tl.store(row + APART, apart)
    tl.store(row + APART + 1, negatives_apart)
    tl.store(row + APART + 2, positives_apart)
    tl.store(row + POSITION, position)


@triton.jit
def _feature(table):
    """The vectors of this program's feature, the first of them, and its position in the call."""
    row = table + tl.program_id(0) * FIELDS
    # As 32-bit numbers, which are five times as fast to divide by.
    return tl.load(row + VECTORS).to(tl.int32), tl.load(row + FIRST).to(tl.int32), tl.load(row + POSITION)


@triton.jit
def _at_least(value, least, other):
    """``value``, but no less than ``least``; without such a bound, ``other`` in place of 0."""
    return tl.where(least > 0, tl.maximum(value, least), tl.where(value > 0, value, other))


@triton.jit(do_not_specialize=["groups", "V", "N", "pairs", "width"])
def scale_statistics(
    sums, table, weight_sum, numbers, exact, groups, V, N, pairs, width, least_scale,
    WEIGHTED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scale = Σ w ‖x − y‖ / Σ w, and the units that follow from it."""
    vectors, first, position = _feature(table)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, groups * vectors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        problem = (i // vectors) * V + first + i % vectors
        total += tl.load(sums + problem, mask=i < groups * vectors, other=0.0).to(tl.float64)
    each = tl.load(weight_sum).to(tl.float64) if WEIGHTED else pairs.to(tl.float64)
    count = each * (N * vectors).to(tl.float64)
    scale = tl.where(count > 0, tl.sum(total, axis=0) / count, 0.0)
    unit = _at_least(scale / tl.sqrt(width.to(tl.float64)), least_scale, 1.0)
    tl.store(numbers + position * (3 + 2 * R), scale.to(tl.float32))
    tl.store(numbers + position * (3 + 2 * R) + 1, _at_least(scale, least_scale, 1.0).to(tl.float32))
    tl.store(exact + position * (1 + R * R), unit)


@triton.jit(do_not_specialize=["groups", "V", "N", "width"])
def drift_statistics(
    products, table, numbers, exact, losses, groups, V, N, width, least_drift,
    NORMALIZE: tl.constexpr, SUM_VECTORS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """E[‖V_τ‖² / D], 1/λ_τ, the loss of the feature, and what weighs its gradient and its products."""
    vectors, first, position = _feature(table)
    row, wide = numbers + position * (3 + 2 * R), exact + position * (1 + R * R)
    unit = tl.load(wide)
    count = (groups * N * vectors).to(tl.float64) * width.to(tl.float64)
    totals = ()
    for _ in tl.static_range(R * (R + 1) // 2):
        totals = totals + (tl.zeros((BLOCK,), tl.float64),)
    for start in range(0, groups * vectors, BLOCK):
        i = start + tl.arange(0, BLOCK)
        problem = ((i // vectors) * V + first + i % vectors).to(tl.int64)
        found = ()
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                at = products + problem * (R * R) + r * R + s
                each = tl.load(at, mask=i < groups * vectors, other=0.0).to(tl.float64)
                found = found + (totals[r * R - r * (r + 1) // 2 + s] + each,)
        totals = found
    means = ()
    for k in tl.static_range(R * (R + 1) // 2):
        means = means + (tl.sum(totals[k], axis=0) / (count * unit * unit),)
    inverse = ()
    for r in tl.static_range(R):
        drift = means[r * R - r * (r + 1) // 2 + r]
        tl.store(row + 3 + r, drift.to(tl.float32))
        norm = _at_least(drift, least_drift, float("inf")) if NORMALIZE else drift * 0.0 + 1.0
        norm = 1.0 / tl.sqrt(norm)
        tl.store(row + 3 + R + r, norm.to(tl.float32))
        inverse = inverse + (norm,)
    counted = vectors.to(tl.float64) if SUM_VECTORS else 1.0
    share = counted / ((vectors * N).to(tl.float64) * width.to(tl.float64))
    loss = unit * 0.0
    for r in tl.static_range(R):
        for s in tl.static_range(r, R):
            weight = inverse[r] * inverse[s] * (1.0 if r == s else 2.0)
            loss += weight * means[r * R - r * (r + 1) // 2 + s]
            tl.store(wide + 1 + r * R + s, weight * share / (unit * unit))
    tl.store(row + 2, (-2 * share / (unit * unit * groups.to(tl.float64))).to(tl.float32))
    tl.store(losses + position, loss * counted)


@triton.jit(do_not_specialize=["V", "features"])
def group_statistics(
    products, table, feature_of_vector, exact, losses, per_group, loss, V, features,
    R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ ⟨V_τ, V_τ'⟩ / (λ_τ λ_τ') of each group, over all vectors and features of one width; and the sum of
    the losses of all features.
    """
    group = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        there = v < V
        feature = tl.load(feature_of_vector + v, mask=there, other=0)
        position = tl.load(table + feature * FIELDS + POSITION, mask=there, other=0)
        for r in tl.static_range(R):
            for s in tl.static_range(r, R):
                weight = tl.load(exact + position * (1 + R * R) + 1 + r * R + s, mask=there, other=0.0)
                at = products + (group * V + v) * (R * R) + r * R + s
                total += weight * tl.load(at, mask=there, other=0.0).to(tl.float64)
    tl.store(per_group + group, tl.sum(total, axis=0).to(per_group.dtype.element_ty))
    if group == 0:
        total = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, features, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += tl.load(losses + i, mask=i < features, other=0.0)
        tl.store(loss, tl.sum(total, axis=0).to(tl.float32))
