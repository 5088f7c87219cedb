"""Random subsets of a feature's vectors: a step compares some locations of a map instead of all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from driftgen.training.step_inputs import Features

__all__ = ["VectorSubsets"]


class VectorSubsets:
    """Keeps at most ``limit`` vectors of each feature, drawn anew for every step.

    The loss is a mean over the vectors of a feature, so a random subset estimates it without bias. Features
    with the same number of vectors share a subset: their vectors belong to the same locations.

    Args:
        vectors: number of vectors of each feature.
        limit: largest number to keep.
    """

    def __init__(self, vectors: Iterable[int], limit: int) -> None:
        self.limit = limit
        self.sizes = sorted({count for count in vectors if count > limit})

    def draw(self, randomness: torch.Generator) -> Tensor:
        """Return the subsets of one step side by side, ``[len(sizes) · limit]``, each in ascending order."""
        chosen = [torch.randperm(n, generator=randomness)[: self.limit].sort().values for n in self.sizes]
        return torch.cat(chosen) if chosen else torch.empty(0, dtype=torch.int64)

    def __call__(self, features: Features, chosen: Tensor) -> Features:
        """Return the chosen vectors of features ``[B, V, D]``."""
        subsets = dict(zip(self.sizes, chosen.split(self.limit), strict=True)) if self.sizes else {}
        return {
            name: value.index_select(1, subsets[value.shape[1]]) if value.shape[1] in subsets else value
            for name, value in features.items()
        }
