"""Drifts in groups of clusters that are far apart, where distances are computed from differences.

Σ_j C_ij y_j − x_i Σ_j C_ij, relative to one origin, is off by about 2⁻²⁴ ‖x_i‖ Σ_j |C_ij|. For a small
cluster far from the origin that is much more than float32 needs: Σ_j C_ij (y_j − x_i) has terms of the size
of the cluster. So kernels compare ‖x_i‖ Σ_j |C_ij| with Σ_j |C_ij| ‖y_j − x_i‖. If it is more than FAR times
as large for some row, they sum the terms themselves, which takes several times as long as products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.drift.fused.affinities_triton import PADDED
from driftgen.drift.fused.distances_triton import load_coordinate

__all__ = [
    "any_is_far",
    "drift_coordinate",
    "in_column",
    "is_far",
    "row_moments",
    "row_radius",
    "tile_coordinate",
]

FAR = tl.constexpr(16.0)


@triton.jit
def row_moments(c, distance, own):
    """Σ_j |C_ij| and Σ_j |C_ij| ‖y_j − x_i‖ of each row. ``own`` is the mask of the samples themselves, whose
    distance is not that of the kernel.
    """
    size = tl.abs(c)
    return tl.sum(size, axis=1), tl.sum(tl.where(own, 0.0, size * distance), axis=1)


@triton.jit
def row_radius(x):
    """Distance of each row from the origin."""
    return tl.sqrt(tl.sum(x * x, axis=1))


@triton.jit
def any_is_far(radius, mass, moment):
    """Return True if some row is so far from the origin, ``radius``, that its drift would lose digits."""
    return tl.max((radius * mass > FAR * moment).to(tl.int32), axis=0) > 0


@triton.jit
def tile_coordinate(c, x, pointer, stride, first, samples, k, B: tl.constexpr):
    """Element k of Σ_j C_ij (y_j − x_i) over the B samples from ``first``, given element k of the rows."""
    y = load_coordinate(pointer, stride, first, samples, k, B)
    return tl.sum(c * (y[None, :] - x[:, None]), axis=1)


@triton.jit
def in_column(values, k, BD: tl.constexpr):
    """Matrix ``[B, BD]`` with the values in column k, and 0 elsewhere."""
    return tl.where((tl.arange(0, BD) == k)[None, :], values[:, None], 0.0)


@triton.jit
def _farthest(distance, own):
    """Largest distance of each row to another sample that exists."""
    return tl.max(tl.where(own | (distance > 0.5 * PADDED), 0.0, distance), axis=1)


@triton.jit
def is_far(cx, cu, cp, dx, du, dp):
    """:func:`any_is_far` for a whole problem, whose origin is no farther than √3 of the farthest sample."""
    i, j = tl.arange(0, cx.shape[0]), tl.arange(0, cx.shape[1])
    own = i[:, None] == j[None, :]
    mass_x, moment_x = row_moments(cx, dx, own)
    mass_u, moment_u = row_moments(cu, du, False)
    mass_p, moment_p = row_moments(cp, dp, False)
    radius = tl.maximum(tl.maximum(_farthest(dx, own), _farthest(du, False)), _farthest(dp, False))
    return any_is_far(radius, mass_x + mass_u + mass_p, moment_x + moment_u + moment_p)


@triton.jit
def drift_coordinate(samples, k, cx, cu, cp, BN: tl.constexpr, BM: tl.constexpr, BP: tl.constexpr):
    """Element k of the drift of each row from differences."""
    gen, neg, pos, stride, N, M, P, _ = samples
    x = load_coordinate(gen, stride, 0, N, k, BN)
    drift = tile_coordinate(cx, x, gen, stride, 0, N, k, BN)
    drift += tile_coordinate(cu, x, neg, stride, 0, M, k, BM)
    return drift + tile_coordinate(cp, x, pos, stride, 0, P, k, BP)
