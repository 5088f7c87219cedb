"""Nearest training neighbors, to detect memorized samples."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.evaluation.precision_recall import as_rows, squared_distances

__all__ = ["copied_share", "nearest_neighbors"]


def nearest_neighbors(x: Tensor, training: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """Return the Euclidean distance of each row of x to its nearest training sample, and its index."""
    x, training = as_rows("x", x, 1), as_rows("training", training, 1)
    if x.shape[1] != training.shape[1]:
        raise InputError(f"x has {x.shape[1]} features, training {training.shape[1]}: both must be equal")
    nearest = [squared_distances(rows, training).min(dim=1) for rows in x.split(chunk)]
    return torch.cat([n.values for n in nearest]).sqrt(), torch.cat([n.indices for n in nearest])


def copied_share(generated: Tensor, training: Tensor, heldout: Tensor, quantile: float = 0.05) -> float:
    """Return the fraction of generated samples that are suspiciously close to a training sample.

    The threshold is the given quantile of the distances of held-out samples to their nearest training sample.
    Without memorization the expected fraction is therefore ``quantile``.
    """
    if not 0 < quantile < 1:
        raise InputError(f"quantile={quantile} must be between 0 and 1")
    threshold = nearest_neighbors(heldout, training)[0].quantile(quantile)
    return float((nearest_neighbors(generated, training)[0] < threshold).double().mean())
