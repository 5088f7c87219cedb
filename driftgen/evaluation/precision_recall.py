"""Precision and recall by nearest neighbours (Kynkäänniemi et al. 2019), as the release computes them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["PrecisionRecall", "manifold_radii", "precision_recall", "squared_distances"]


class PrecisionRecall(NamedTuple):
    """Precision: the share of generated samples on the real manifold. Recall: the reverse."""

    precision: float
    recall: float


def precision_recall(real: Tensor, generated: Tensor, k: int = 3, chunk: int = 4096) -> PrecisionRecall:
    """Precision and recall of two sets of feature vectors, ``[n, ...]`` and ``[m, ...]``.

    A manifold is the union of balls around the samples of a set, each reaching to the sample's k-th nearest
    neighbour. Collapse shows in the recall alone. Both depend on n and m: compare at equal numbers only.
    At most ``chunk`` rows of a distance matrix are held at a time.
    """
    real, generated = as_rows("real", real, k + 1), as_rows("generated", generated, k + 1)
    if real.shape[1] != generated.shape[1]:
        raise InputError(f"real has {real.shape[1]} features, generated {generated.shape[1]}")
    real_radii, generated_radii = manifold_radii(real, k, chunk), manifold_radii(generated, k, chunk)
    precise, recalled = [], torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for rows, own_radii in zip(generated.split(chunk), generated_radii.split(chunk), strict=True):
        distances = squared_distances(rows, real)
        precise.append((distances <= real_radii).any(dim=1))
        recalled |= (distances <= own_radii[:, None]).any(dim=0)
    return PrecisionRecall(float(torch.cat(precise).double().mean()), float(recalled.double().mean()))


def manifold_radii(x: Tensor, k: int = 3, chunk: int = 4096) -> Tensor:
    """The squared distance of each row to its k-th nearest other row, ``[n]``."""
    x = as_rows("x", x, k + 1)
    # The nearest of all is the row itself.
    nearest = [squared_distances(rows, x).topk(k + 1, largest=False).values for rows in x.split(chunk)]
    return torch.cat(nearest).amax(dim=1)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x − y‖² of all pairs, ``[n, m]``, in float64, since they are small differences of large numbers."""
    x, y = x.double(), y.double()
    squares = (x * x).sum(dim=1)[:, None] + (y * y).sum(dim=1)
    return torch.addmm(squares, x, y.T, alpha=-2).clamp_(min=0)


def as_rows(argument: str, x: Tensor, least: int) -> Tensor:
    """``[n, features]`` of a set of at least ``least`` finite samples."""
    if x.ndim < 2 or len(x) < least:
        raise InputError(f"{argument} has shape {list(x.shape)}, expected at least {least} rows of features")
    if not x.isfinite().all():
        raise InputError(f"{argument} holds NaN or infinite values: remove or repair those samples")
    return x.detach().flatten(1)
