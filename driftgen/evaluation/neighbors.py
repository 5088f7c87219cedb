"""Nearest training neighbors, to detect memorized samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.errors import InputError
from driftgen.evaluation.precision_recall import as_rows, squared_distances

__all__ = ["CosineNeighbors", "NearCopies", "copied_share", "near_copies", "nearest_neighbors"]


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
    _check_quantile(quantile)
    threshold = nearest_neighbors(heldout, training)[0].quantile(quantile)
    return float((nearest_neighbors(generated, training)[0] < threshold).double().mean())


class CosineNeighbors:
    """The k training rows with the highest cosine similarity to each query, over batches of training rows.

    Only the queries and the best k of each are in memory, so the training set can have any size. Similarities
    are float64.

    Args:
        queries: feature vectors ``[n, D]``.
        k: neighbors per query.
        exclude: ``[n]``, index of the training row that is the query itself and does not count; -1 for none.

    Attributes:
        similarities: ``[n, k]``, highest first; -inf while fewer than k rows are known.
        indices: ``[n, k]``, indices of these rows among all training rows so far.
        seen: number of training rows so far.
    """

    def __init__(self, queries: Tensor, k: int, exclude: Tensor | None = None) -> None:
        if k < 1:
            raise InputError(f"k={k} must be at least 1")
        self.queries = _unit_rows("queries", queries)
        n, device = len(self.queries), self.queries.device
        self.exclude = torch.full((n,), -1) if exclude is None else exclude
        if self.exclude.shape != (n,):
            raise InputError(f"exclude has shape {list(self.exclude.shape)}, expected [{n}]")
        self.exclude = self.exclude.to(device)
        self.similarities = torch.full((n, k), float("-inf"), dtype=torch.float64, device=device)
        self.indices = torch.full((n, k), -1, device=device)
        self.seen = 0

    def update(self, training: Tensor) -> None:
        """Compare the queries with the next training rows, ``[b, D]``."""
        rows = _unit_rows("training", training).to(self.queries.device)
        if rows.shape[1] != self.queries.shape[1]:
            raise InputError(
                f"queries has {self.queries.shape[1]} features, training {rows.shape[1]}: both must be equal"
            )
        similarities = (self.queries @ rows.T).clamp_(-1, 1)
        own = self.exclude - self.seen
        inside = ((own >= 0) & (own < len(rows))).nonzero()[:, 0]
        similarities[inside, own[inside]] = float("-inf")
        k = self.similarities.shape[1]
        best = similarities.topk(min(k, len(rows)))
        merged = torch.cat([self.similarities, best.values], dim=1)
        indices = torch.cat([self.indices, best.indices + self.seen], dim=1)
        # Stable: among equally similar rows the earlier one stays first.
        order = merged.argsort(dim=1, descending=True, stable=True)[:, :k]
        self.similarities, self.indices = merged.gather(1, order), indices.gather(1, order)
        self.seen += len(rows)


class NearCopies(NamedTuple):
    """Fraction of near-copies: samples that are more similar to a training image than the threshold.

    Attributes:
        threshold: quantile of the similarities of the held-out images.
        share: fraction of generated samples above the threshold.
        heldout_share: fraction of held-out images above it.
    """

    threshold: float
    share: float
    heldout_share: float


def near_copies(generated: Tensor, heldout: Tensor, quantile: float = 0.05) -> NearCopies:
    """Count near-copies from each image's similarity to its nearest training image, ``[n]`` and ``[m]``.

    The fraction ``quantile`` of the held-out images is above the threshold by construction. They cannot be
    copies: a model without memorization therefore has an expected share of ``quantile``.
    """
    _check_quantile(quantile)
    generated, heldout = generated.double(), heldout.double()
    # "lower" picks the similarity of an image: interpolation could round to just below it.
    threshold = heldout.quantile(1 - quantile, interpolation="lower")
    shares = ((values > threshold).double().mean() for values in (generated, heldout))
    return NearCopies(float(threshold), *map(float, shares))


def _unit_rows(argument: str, x: Tensor) -> Tensor:
    return F.normalize(as_rows(argument, x, 1).double(), dim=1)


def _check_quantile(quantile: float) -> None:
    if not 0 < quantile < 1:
        raise InputError(f"quantile={quantile} must be between 0 and 1")
