"""From sums over the batch to scale, drift norms and loss (appendix "Feature and Drift Normalization").

``[F]`` is one value for each feature. ``fused/statistics_triton.py`` does the same arithmetic in kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.drift.interfaces import Settings, Statistics

__all__ = [
    "LossTerms",
    "Norms",
    "Products",
    "Units",
    "drift_norms",
    "loss_terms",
    "mean_distance",
    "pair_factor",
    "power_of_two",
    "scale_units",
]


class Units(NamedTuple):
    """Units of each feature, ``[F]``: S √D divides distances, S divides coordinates."""

    distance: Tensor
    coordinate: Tensor


class Products(NamedTuple):
    """Sums of ⟨V_τ, V_τ'⟩, ``[F, R, R]``. The unit of V_τ is exp(``log_unit``), ``[F, R]``, or 1 if None."""

    sums: Tensor
    log_unit: Tensor | None = None

    def shifted(self, log_unit: Tensor) -> Tensor:
        """Return the sums for other units of V_τ."""
        assert self.log_unit is not None
        return self.sums * pair_factor(self.log_unit - log_unit)


class Norms(NamedTuple):
    """Means of ⟨V_τ, V_τ'⟩ / D, ``[F, R, R]``, 1/λ_τ, ``[F, R]``, and the unit of V_τ as in ``Products``."""

    products: Tensor
    inverse: Tensor
    log_unit: Tensor | None

    @property
    def drift(self) -> Tensor:
        """E[‖V_τ‖² / D], ``[F, R]``, in units of 1."""
        squared = self.products.diagonal(dim1=-2, dim2=-1)
        return squared if self.log_unit is None else squared * (2 * self.log_unit).exp()


class LossTerms(NamedTuple):
    """Loss of the batch, and of each feature: factor of ‖Ṽ‖² in the loss of a group, factor of Ṽ in the
    gradient, and the typical size of Ṽ rounded to a power of two.
    """

    loss: Tensor
    share: Tensor
    gradient_factor: Tensor
    drift_size: Tensor


def mean_distance(sums: Tensor) -> Tensor:
    """E_x E_y ‖φ(x) − φ(y)‖ of each feature, from Σ w ‖x − y‖ and Σ w, the first columns of ``[F, 3]``."""
    return sums[:, 0] / sums[:, 1].clamp(min=torch.finfo(sums.dtype).tiny)


def scale_units(settings: Settings, scale: Tensor, widths: Tensor, given: Statistics | None) -> Units:
    """Units that follow from the mean distance, or from that of ``given``."""
    if not settings.normalize_features:
        return Units(torch.ones_like(scale), torch.ones_like(scale))
    if given is not None:
        scale = given.scale.to(scale).expand_as(scale)
    least = settings.guards.min_scale
    return Units(_at_least(scale, least), _at_least(scale / widths.sqrt(), least))


def pair_factor(log_factor: Tensor) -> Tensor:
    """Factor of ⟨V_τ, V_τ'⟩, ``[..., R, R]``, if V_τ has the factor exp(``log_factor``), ``[..., R]``."""
    return (log_factor[..., :, None] + log_factor[..., None, :]).exp()


def drift_norms(settings: Settings, products: Products, count: Tensor, given: Statistics | None) -> Norms:
    """Norms λ_τ = √E[‖V_τ‖² / D] from Σ ⟨V_τ, V_τ'⟩ over ``count`` coordinates, or those of ``given``."""
    means, log_unit = products.sums / count[:, None, None], products.log_unit
    squared = means.diagonal(dim1=-2, dim2=-1)
    inverse = torch.ones_like(squared)
    if settings.normalize_drift:
        if given is not None:
            squared = given.drift.to(means).expand_as(squared)
        inverse = _at_least(squared, settings.guards.min_drift, instead=math.inf).rsqrt()
    if log_unit is not None and (given is not None or not settings.normalize_drift):
        inverse = inverse * log_unit.exp()  # measured norms are in the unit of V_τ already
    return Norms(means, inverse, log_unit)


def loss_terms(
    settings: Settings, norms: Norms, unit: Tensor, samples: int, vectors: Tensor, widths: Tensor,
    groups: Tensor | int,
) -> LossTerms:  # fmt: skip
    """Loss from ‖Σ_τ V_τ/λ_τ‖² = Σ_ττ' ⟨V_τ, V_τ'⟩ / (λ_τ λ_τ'), and the factors that belong to it.

    The products of all pairs of temperatures give the loss of the whole batch without a third collective.
    """
    factor = vectors if settings.sum_vectors else torch.ones_like(vectors)
    per_feature = torch.einsum("frs,fr,fs->f", norms.products, norms.inverse, norms.inverse).clamp(min=0)
    share = factor / (vectors * samples * widths)
    drift_size = power_of_two(per_feature, torch.frexp(per_feature.sqrt()).exponent)
    return LossTerms((per_feature * factor).sum(), share, -2 * share / (unit * groups), drift_size)


def power_of_two(like: Tensor, exponent: Tensor) -> Tensor:
    """2^exponent in the dtype of ``like``. ``torch.ldexp`` computes the power in float32."""
    return torch.full_like(like, 2.0).pow(exponent)


def _at_least(value: Tensor, least: float, instead: float = 1.0) -> Tensor:
    """Clamp to ``least``; without such a bound, replace 0 by ``instead``, so that 0/0 becomes 0."""
    return value.clamp(min=least) if least > 0 else torch.where(value > 0, value, instead)
