"""Metrics of point clouds."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.drift.field import pairwise_distance

__all__ = ["energy_distance", "mode_shares"]


def energy_distance(x: Tensor, y: Tensor) -> float:
    """Unbiased energy distance, 2 E‖x − y‖ − E‖x − x'‖ − E‖y − y'‖.

    Its expectation is 0 for equal distributions, so single values can be slightly negative.
    """
    n, m = len(x), len(y)
    between = pairwise_distance(x, y).double().mean()
    within_x = pairwise_distance(x, x).double().sum() / (n * (n - 1))
    within_y = pairwise_distance(y, y).double().sum() / (m * (m - 1))
    return float(2 * between - within_x - within_y)


def mode_shares(x: Tensor, modes: Tensor) -> list[float]:
    """Return the fraction of points nearest to each mode, relative to an equal share (1 is ideal)."""
    nearest = pairwise_distance(x, modes).argmin(dim=1)
    counts = torch.bincount(nearest, minlength=len(modes))
    return [float(c) for c in counts * len(modes) / len(x)]
