"""Inception score (Salimans et al. 2016), summed over images as they come."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["InceptionScore", "ScoreSums", "split_of_images"]

SPLITS, SEED = 10, 2020


class InceptionScore(NamedTuple):
    """Mean and standard deviation over splits."""

    mean: float
    std: float


def split_of_images(count: int, splits: int = SPLITS) -> Tensor:
    """Return the split of each image, ``[count]``, -1 for the remainder that belongs to none.

    Splits are equal parts of a fixed permutation, as in the release. They are known before the first image,
    so the score needs no stored predictions.
    """
    order = np.random.RandomState(SEED).permutation(count)
    size = count // splits
    split = np.full(count, -1)
    for i in range(splits):
        split[order[i * size : (i + 1) * size]] = i
    return torch.from_numpy(split)


class ScoreSums:
    """exp(E_x KL(p(y|x) ‖ p(y))) of each split, from Σ p and Σ_y p log p in float64.

    Args:
        count: number of images; their order decides their split.
        splits: number of splits.
    """

    def __init__(self, count: int, splits: int = SPLITS) -> None:
        if count < splits:
            raise InputError(f"an Inception score needs at least {splits} images, there are {count}")
        self.split, self.size = split_of_images(count, splits), count // splits
        self.probabilities: Tensor | None = None  # Σ p, [splits, classes]
        self.entropies = torch.zeros(splits, dtype=torch.float64)  # Σ_x Σ_y p log p

    def update(self, logits: Tensor, indices: Tensor) -> None:
        """Add logits ``[n, classes]`` of the images with these indices."""
        log_p = torch.log_softmax(logits.double(), dim=1)
        p = log_p.exp()
        split = self.split[indices.cpu()]
        used = split >= 0
        split = split[used].to(p.device)
        p, log_p = p[used.to(p.device)], log_p[used.to(p.device)]
        if self.probabilities is None:
            self.probabilities = p.new_zeros((len(self.entropies), p.shape[1]))
        self.entropies = self.entropies.to(p.device)
        self.probabilities.index_add_(0, split, p)
        self.entropies.index_add_(0, split, (p * log_p).sum(dim=1))

    def compute(self) -> InceptionScore:
        """Return the score of all images."""
        if self.probabilities is None:
            raise InputError("an Inception score needs logits: the Inception file has no classifier")
        mean = self.probabilities / self.size
        # E KL = E Σ p log p − Σ p̄ log p̄
        kl = self.entropies / self.size - torch.special.xlogy(mean, mean).sum(dim=1)
        scores = kl.exp()
        return InceptionScore(float(scores.mean()), float(scores.std(correction=0)))
