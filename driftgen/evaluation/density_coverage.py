"""Density and coverage by nearest neighbors (Naeem et al. 2020)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.evaluation.precision_recall import feature_rows, manifold_radii, squared_distances
from driftgen.support.checked_arguments import checked
from driftgen.support.whole_numbers import check_count

__all__ = ["DensityCoverage", "density_coverage"]


class DensityCoverage(NamedTuple):
    """Density: balls around real samples that hold a generated sample, relative to k; can exceed 1.

    Coverage: the fraction of real samples whose ball holds a generated sample.
    """

    density: float
    coverage: float


@checked
def density_coverage(real: Tensor, generated: Tensor, k: int = 5, chunk: int = 4096) -> DensityCoverage:
    """Density and coverage of two sets of feature vectors, ``[n, ...]`` and ``[m, ...]``.

    With r_i the distance of x_i to its k-th nearest other real sample::

        density  = 1 / (k m) Σ_j Σ_i 1[‖y_j − x_i‖ < r_i]
        coverage = 1 / n Σ_i 1[some j has ‖y_j − x_i‖ < r_i]

    Both are about 1 if the sets come from one distribution (the expected coverage is 1 − 2^−k for n = m). An
    outlier among the real samples has a large ball, which raises the precision of poor samples but hardly
    their density. The comparison is strict, as in the authors' implementation: a set against itself has a
    density of exactly 1. At most ``chunk`` rows of the distance matrix are in memory at a time.
    """
    check_count("k", k)
    check_count("chunk", chunk)
    k, chunk = int(k), int(chunk)  # also of NumPy
    real, generated = feature_rows(real, generated, k + 1, 1)
    radii = manifold_radii(real, k, chunk)
    pairs, covered = 0, 0
    # Rows are real, as in manifold_radii: equal samples then have equal distances, bit by bit.
    for rows, row_radii in zip(real.split(chunk), radii.split(chunk), strict=True):
        inside = (squared_distances(rows, generated) < row_radii[:, None]).sum(dim=1)
        pairs += int(inside.sum())
        covered += int(torch.count_nonzero(inside))
    return DensityCoverage(pairs / (k * len(generated)), covered / len(real))
