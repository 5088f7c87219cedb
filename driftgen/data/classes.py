"""Number the classes of a dataset, and select its images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["choose", "number_classes"]


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


def number_classes(values: Sequence[int | str]) -> tuple[NDArray[np.int64], list[str], list[str]]:
    """Number the classes that labels name, in order; return labels, class names and notes.

    Labels are integers, which keep their order, or strings. Class names are the labels as text.
    """
    found = sorted(set(values), key=lambda value: (isinstance(value, str), value))
    index = {value: i for i, value in enumerate(found)}
    labels = np.asarray([index[value] for value in values], np.int64)
    notes = []
    if found and not isinstance(found[0], str) and found != list(range(len(found))):
        notes.append(
            f"labels {found[0]} ... {found[-1]} have gaps or do not start at 0: classes are numbered "
            f"0 ... {len(found) - 1}, their names are the labels"
        )
    return labels, [str(value) for value in found], notes
