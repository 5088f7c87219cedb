"""Identifiability of equilibrium (appendix "On Identifiability of the Zero-Drift Equilibrium").

p = Σ_i a_i φ_i and q = Σ_i b_i φ_i are mixtures of m basis functions, and the field is evaluated at N
probes. Each pair of basis functions induces one interaction vector U_ij in R^(D·N), and

    V_X = Σ_ij a_i b_j U_ij = Σ_{i<j} (a_i b_j − a_j b_i) U_ij.

If the vectors with i < j are linearly independent, V_X = 0 implies a ∝ b, hence p = q. The functions here
compute the vectors, their rank, and a q ≠ p without drift where the argument fails. All computations are in
float64. The field is the mean-shift field before normalization: dividing by Z_p Z_q > 0 moves no zero.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from driftgen.drift.arguments import check_temperature
from driftgen.drift.kernels import Kernel, gaussian, get_kernel
from driftgen.errors import InputError

__all__ = [
    "RANK_TOLERANCE",
    "Basis",
    "driftless_mixture",
    "equilibrium_directions",
    "field_of_pairs",
    "field_operator",
    "gaussian_basis",
    "interaction_vectors",
    "mixture_distance",
    "numerical_rank",
    "pair_coefficients",
    "pair_matrix",
    "point_basis",
    "relative_singular_values",
]

RANK_TOLERANCE = 1e-10
"""Singular values below this fraction of the largest count as zero."""


class Basis(NamedTuple):
    """Basis functions φ_i = Σ_s weights_is δ(y − points_is): point masses, or densities as quadrature nodes.

    Attributes:
        points: ``[m, S, D]``, float64.
        weights: ``[m, S]``, float64; each row sums to ∫ φ_i = 1.
    """

    points: Tensor
    weights: Tensor


def point_basis(points: Tensor) -> Basis:
    """Return one point mass φ_i = δ(y − y_i) for each row of ``points`` ``[m, D]``."""
    points = _rows("points", points)
    return Basis(points[:, None, :], points.new_ones(len(points), 1))


def gaussian_basis(centers: Tensor, width: float, order: int = 12) -> Basis:
    """Return Gaussian densities φ_i = N(c_i, width² I) on ``order``^D nodes of Gauss–Hermite quadrature."""
    centers = _rows("centers", centers)
    if width <= 0 or order < 1:
        raise InputError(f"width={width!r} and order={order!r} must be positive")
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(order))
    dim = centers.shape[1]
    offsets = torch.cartesian_prod(*[nodes] * dim).reshape(-1, dim)
    mass = torch.cartesian_prod(*[weights / weights.sum()] * dim).reshape(-1, dim).prod(dim=1)
    return Basis(centers[:, None, :] + width * offsets, mass.expand(len(centers), -1))


def interaction_vectors(
    probes: Tensor, basis: Basis, *, temperature: float, kernel: str | Kernel = "laplace"
) -> Tensor:
    """Return the interaction vectors U ``[m, m, N, D]`` at probes x ``[N, D]``.

    U_ij(x) = ∬ k(x, y⁺) k(x, y⁻) (y⁺ − y⁻) φ_i(y⁺) φ_j(y⁻) dy⁺ dy⁻. The double integral separates:
    U_ij = z_j s_i − z_i s_j, with z_i(x) = ∫ k(x, y) φ_i(y) dy and s_i(x) = ∫ k(x, y) (y − x) φ_i(y) dy.
    Exchanging i and j negates every product, so U_ij = −U_ji and U_ii = 0 hold to the last bit.
    """
    check_temperature("temperature", temperature)
    probes = _rows("probes", probes)
    if probes.shape[1] != basis.points.shape[2]:
        raise InputError(
            f"probes have width {probes.shape[1]}, but the basis has width {basis.points.shape[2]}"
        )
    offset = basis.points[:, None, :, :] - probes[None, :, None, :]
    distance = torch.linalg.vector_norm(offset, dim=-1)
    mass = get_kernel(kernel)(distance, temperature).exp() * basis.weights[:, None, :]
    z, s = mass.sum(dim=-1), (mass[..., None] * offset).sum(dim=-2)
    return z[None, :, :, None] * s[:, None] - z[:, None, :, None] * s[None, :]


def pair_coefficients(a: Tensor, b: Tensor) -> Tensor:
    """Return the coefficients a_i b_j − a_j b_i ``[m, m]`` of the interaction vectors. All are 0 if a ∝ b."""
    product = torch.outer(a, b)
    return product - product.T


def field_of_pairs(vectors: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return V_X = Σ_{i<j} (a_i b_j − a_j b_i) U_ij ``[N, D]`` of the mixtures with coefficients a and b."""
    return torch.einsum("ij,ijnd->nd", pair_coefficients(a, b).triu(diagonal=1), vectors)


def pair_matrix(vectors: Tensor) -> Tensor:
    """Return the vectors U_ij with i < j as columns, ``[D·N, m(m − 1)/2]``."""
    m = len(vectors)
    first, second = torch.triu_indices(m, m, offset=1)
    return vectors[first, second].flatten(1).T


def field_operator(vectors: Tensor, a: Tensor) -> Tensor:
    """Return the matrix ``[D·N, m]`` of the map b ↦ V_X for a fixed p: column j is Σ_i a_i U_ij.

    V is bilinear, so for one p the equilibrium is a linear problem in q. Its null space always holds a.
    Rank m − 1 is enough for q = p: D·N ≥ m − 1 equations instead of m(m − 1)/2.
    """
    return torch.einsum("i,ijnd->jnd", a, vectors).flatten(1).T


def relative_singular_values(matrix: Tensor) -> Tensor:
    """Return the singular values, one for each column, descending, as fractions of the largest.

    Columns are scaled to norm 1 first, so that a weak pair does not look like a dependent one. Columns below
    ``RANK_TOLERANCE`` of the largest norm are zero up to rounding and count as zero.
    """
    norms = torch.linalg.vector_norm(matrix, dim=0)
    present = norms > RANK_TOLERANCE * norms.max()
    scaled = torch.where(present, matrix / torch.where(present, norms, 1.0), 0.0)
    values = torch.linalg.svdvals(scaled)
    values = torch.cat([values, values.new_zeros(matrix.shape[1] - len(values))])
    return values / values[0] if values[0] > 0 else values


def numerical_rank(matrix: Tensor) -> int:
    """Return the number of relative singular values above ``RANK_TOLERANCE``."""
    return int((relative_singular_values(matrix) > RANK_TOLERANCE).sum())


def equilibrium_directions(vectors: Tensor, a: Tensor) -> Tensor:
    """Return an orthonormal basis ``[r, m]`` of {n : Σ_ij a_i n_j U_ij = 0, Σ_j n_j = 0}.

    V_X stays 0 along b = a + t n, and the mass of q stays 1. r = 0 means that V_X = 0 implies b = a.
    """
    operator = field_operator(vectors, a)
    scale = torch.linalg.matrix_norm(operator, ord=2)
    rows = torch.cat([operator / torch.where(scale > 0, scale, 1.0), operator.new_ones(1, len(a))])
    values, right = torch.linalg.svd(rows, full_matrices=True)[1:]
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    directions: Tensor = right[rank:]
    return directions


def driftless_mixture(vectors: Tensor, a: Tensor) -> Tensor | None:
    """Return coefficients b ≠ a, b ≥ 0, Σ b = 1, with V_X = 0; None if V_X = 0 implies b = a.

    b = a + t n, with t as large as b ≥ 0 allows. n is the projection of the unit vector that is nearest to
    the span of ``equilibrium_directions``: it depends on the span alone, not on the signs of an SVD.
    """
    if (a <= 0).any():
        raise InputError("a holds coefficients that are not positive: start from the interior of the simplex")
    directions = equilibrium_directions(vectors, a)
    if not len(directions):
        return None
    projection = directions.T @ directions
    n = projection[projection.diagonal().argmax()]
    t = (a / -n)[n < 0].min()
    return (a + t * n).clamp(min=0)


def mixture_distance(basis: Basis, a: Tensor, b: Tensor, *, bandwidth: float = 1.0) -> float:
    """Return the MMD of two mixtures with a Gaussian kernel: 0 if and only if p = q as distributions.

    Different coefficients of a redundant basis can mean the same distribution.
    """
    points = basis.points.flatten(0, 1)
    mass = ((b - a)[:, None] * basis.weights).flatten()
    distance = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    square = mass @ gaussian(distance, bandwidth).exp() @ mass
    return float(square.clamp(min=0).sqrt())


def _rows(argument: str, x: Tensor) -> Tensor:
    if x.ndim != 2 or 0 in x.shape:
        raise InputError(f"{argument} has shape {list(x.shape)}, expected [n, D] with at least one row")
    return x.detach().double()
