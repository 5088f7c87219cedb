"""Select the images of a dataset and their labels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["choose"]


def choose(
    labels: NDArray[np.int64], names: list[str], config: Data
) -> tuple[Tensor, list[str], NDArray[np.int64]]:
    """Apply ``conditional`` and ``limit``; return labels, class names and the indices of the chosen images.

    A limit takes the first image of each class, then the second of each, and so on.
    """
    chosen = np.arange(len(labels))
    if not config.conditional:
        labels, names = np.zeros_like(labels), ["all"]
    if config.limit is not None and config.limit < len(labels):
        if config.limit < len(names):
            raise InputError(
                f"data.limit={config.limit} is below the {len(names)} classes: raise it, or set "
                "data.conditional=false"
            )
        order = np.argsort(labels, kind="stable")
        starts = np.searchsorted(labels[order], labels[order])
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order)) - starts
        chosen = np.sort(np.lexsort((labels, rank))[: config.limit])
    return torch.from_numpy(labels[chosen].astype(np.int64)), names, chosen
