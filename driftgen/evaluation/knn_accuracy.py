"""Accuracy of a nearest-neighbor classifier: how well an encoder separates classes, without training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from driftgen.data.images import RealData
from driftgen.errors import InputError
from driftgen.evaluation.neighbors import CosineNeighbors

__all__ = ["classify", "knn_accuracy"]

TEMPERATURE = 0.07
ENCODED = 500  # images encoded at a time


def classify(similarities: Tensor, labels: Tensor, classes: int, temperature: float = TEMPERATURE) -> Tensor:
    """Return argmax_c Σ_i exp(s_i / T) [y_i = c] over the neighbors i of each row.

    Args:
        similarities: ``[n, k]``, cosine similarity s of each neighbor.
        labels: ``[n, k]``, class y of each neighbor.
        classes: number of classes.
        temperature: T; the smaller, the more the nearest neighbor counts.
    """
    weights = ((similarities - similarities.max(dim=1, keepdim=True).values) / temperature).exp()
    votes = weights.new_zeros(len(weights), classes).scatter_add_(1, labels, weights)
    return votes.argmax(dim=1)


@torch.no_grad()
def knn_accuracy(
    encode: Callable[[Tensor], Tensor],
    training: RealData,
    heldout: RealData,
    *,
    k: int = 20,
    device: torch.device | None = None,
) -> float:
    """Return the accuracy of a k-nearest-neighbor classifier on held-out images.

    Args:
        encode: maps images ``[B, C, H, W]`` in [-1, 1] to vectors ``[B, D]``.
        training: labeled images, without augmentation.
        heldout: labeled images of the same classes.
        k: neighbors that vote, by cosine similarity; see :func:`classify`.
        device: where images are encoded; the CPU if None.
    """
    classes = len(training.class_names)
    if len(heldout.class_names) != classes:
        raise InputError(
            f"held-out images have {len(heldout.class_names)} classes, the training images {classes}: give "
            "images of the same classes"
        )
    if len(training.labels) < k:
        raise InputError(f"k={k} neighbors, but there are {len(training.labels)} training images")

    def features(data: RealData, chosen: Tensor) -> Tensor:
        return encode(data.load(chosen, seed=0).to(device))

    queries = [features(heldout, chosen) for chosen in torch.arange(len(heldout.labels)).split(ENCODED)]
    search = CosineNeighbors(torch.cat(queries), k)
    for chosen in torch.arange(len(training.labels)).split(ENCODED):
        search.update(features(training, chosen))
    labels = training.labels[search.indices.cpu()]
    predicted = classify(search.similarities.cpu(), labels, classes)
    return float((predicted == heldout.labels).double().mean())
