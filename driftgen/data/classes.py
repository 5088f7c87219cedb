"""Which images of a data set are used, and under which labels."""

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
    numbers: NDArray[np.int64], names: list[str], config: Data
) -> tuple[Tensor, list[str], NDArray[np.int64]]:
    """Labels, class names and which images are kept, after ``conditional`` and ``limit``.

    A limit takes the first image of each class, then the second of each, and so on.
    """
    kept = np.arange(len(numbers))
    if not config.conditional:
        numbers, names = np.zeros_like(numbers), ["all"]
    if config.limit is not None and config.limit < len(numbers):
        if config.limit < len(names):
            raise InputError(
                f"data.limit={config.limit} is below the {len(names)} classes: raise it, or set "
                "data.conditional=false"
            )
        order = np.argsort(numbers, kind="stable")
        starts = np.searchsorted(numbers[order], numbers[order])
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order)) - starts
        kept = np.sort(np.lexsort((numbers, rank))[: config.limit])
    return torch.from_numpy(numbers[kept].astype(np.int64)), names, kept
