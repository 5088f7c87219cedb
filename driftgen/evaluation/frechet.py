"""Fréchet distance between feature distributions, from moments that are summed in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["Moments", "frechet_distance"]


@dataclass(frozen=True)
class Moments:
    """Sums over feature vectors: enough for mean and covariance, and additive over batches and processes.

    Attributes:
        count: n, number of feature vectors.
        total: Σ f, ``[D]``, float64.
        outer: Σ f fᵀ, ``[D, D]``, float64.
    """

    count: int
    total: Tensor
    outer: Tensor

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Return the moments of features ``[n, D]``."""
        if features.ndim != 2:
            raise InputError(f"features has shape {list(features.shape)}, expected [n, D]")
        x = features.detach().double()
        return cls(len(x), x.sum(dim=0), x.T @ x)

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.outer + other.outer)

    @property
    def mean(self) -> Tensor:
        """μ = Σ f / n, ``[D]``."""
        return self.total / self.count

    @property
    def covariance(self) -> Tensor:
        """Unbiased covariance (Σ f fᵀ − n μ μᵀ) / (n − 1), ``[D, D]``."""
        if self.count < 2:
            raise InputError(f"a covariance needs at least 2 samples, there are {self.count}")
        return (self.outer - self.count * torch.outer(self.mean, self.mean)) / (self.count - 1)


def frechet_distance(a: Moments, b: Moments) -> float:
    """Fréchet distance of two Gaussians, ‖μ_a − μ_b‖² + tr(Σ_a + Σ_b − 2 (Σ_a Σ_b)^½), in float64.

    The trace of the square root is Σ_i √λ_i(R Σ_b R) with R = Σ_a^½: symmetric problems only, so covariances
    of low rank (fewer samples than dimensions) need no regularization.
    """
    if a.total.shape != b.total.shape:
        raise InputError(f"features have {len(a.total)} and {len(b.total)} dimensions: both must be equal")
    for moments in (a, b):
        if not (moments.total.isfinite().all() and moments.outer.isfinite().all()):
            raise InputError("features hold NaN or infinite values: remove these samples")
    device = a.total.device
    mean, covariance = b.mean.to(device), b.covariance.to(device)
    values, vectors = torch.linalg.eigh(a.covariance)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    product = root @ covariance @ root
    cross = torch.linalg.eigvalsh((product + product.T) / 2).clamp(min=0).sqrt().sum()
    distance = (a.mean - mean).square().sum() + a.covariance.trace() + covariance.trace() - 2 * cross
    return float(distance)
