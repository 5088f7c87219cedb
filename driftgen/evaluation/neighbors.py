"""Nearest training neighbours: does a generator make samples of its own, or copies?"""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.evaluation.precision_recall import as_rows, squared_distances

__all__ = ["copied_share", "nearest_neighbors"]


def nearest_neighbors(x: Tensor, training: Tensor, chunk: int = 4096) -> tuple[Tensor, Tensor]:
    """Of each row of x, the Euclidean distance to the nearest training sample, and that one's index."""
    x, training = as_rows("x", x, 1), as_rows("training", training, 1)
    if x.shape[1] != training.shape[1]:
        raise InputError(f"x has {x.shape[1]} features, training {training.shape[1]}")
    found = [squared_distances(rows, training).min(dim=1) for rows in x.split(chunk)]
    return torch.cat([f.values for f in found]).sqrt(), torch.cat([f.indices for f in found])


def copied_share(generated: Tensor, training: Tensor, heldout: Tensor, quantile: float = 0.05) -> float:
    """The share of generated samples that lie nearer to a training sample than the given quantile of
    held-out samples does.

    Real samples that were never seen are that near with a share of ``quantile``, so that is the share to
    expect where nothing is copied.
    """
    if not 0 < quantile < 1:
        raise InputError(f"quantile={quantile} must lie between 0 and 1")
    near = nearest_neighbors(heldout, training)[0].quantile(quantile)
    return float((nearest_neighbors(generated, training)[0] < near).double().mean())
