"""Evaluate generated digits: recognition, precision and recall, diversity, memorization."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.data.images import digits
from driftgen.errors import InputError
from driftgen.evaluation.neighbors import copied_share
from driftgen.evaluation.precision_recall import as_rows, precision_recall, squared_distances

__all__ = ["BARS", "DigitClassifier", "evaluate_digits", "within_class_spread"]

# Targets of the digits recipe at guidance 1.5: lower bounds, except for ``copied``, an upper bound.
BARS: dict[str, float] = {
    "recognized": 0.97,
    "precision_heldout": 0.80,
    "recall_heldout": 0.45,
    "precision_training": 0.70,
    "recall_training": 0.60,
    "spread": 0.85,
    "copied": 0.05,
}


class DigitClassifier:
    """Kernel ridge regression with a Gaussian kernel.

    The solution has a closed form, so every machine gets the same classifier. ``width`` is relative to the
    root mean squared distance between training images.
    """

    def __init__(self, images: Tensor, labels: Tensor, width: float = 0.5, ridge: float = 1e-2) -> None:
        self.images = as_rows("images", images, 2).double()
        distances = squared_distances(self.images, self.images)
        self.scale = float(2 * width**2 * distances.mean())
        kernel = torch.exp(-distances / self.scale)
        kernel.diagonal().add_(ridge)
        targets = torch.nn.functional.one_hot(labels.long()).double()
        self.mean = targets.mean(dim=0)
        self.coefficients = torch.linalg.solve(kernel, targets - self.mean)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the most likely label of each image."""
        distances = squared_distances(as_rows("images", images, 1), self.images)
        scores: Tensor = self.mean + torch.exp(-distances / self.scale) @ self.coefficients
        return scores.argmax(dim=1)


def within_class_spread(images: Tensor, labels: Tensor, num_classes: int = 10) -> Tensor:
    """Return the mean distance between two images of each class, ``[num_classes]``.

    A class with fewer than two images yields NaN.
    """
    spreads = []
    for label in range(num_classes):
        rows = images[labels == label].flatten(1)
        pairs = len(rows) * (len(rows) - 1)
        distances = squared_distances(rows, rows).sqrt()
        spreads.append(distances.sum() / pairs if pairs else distances.new_tensor(float("nan")))
    return torch.stack(spreads)


def evaluate_digits(samples: Tensor, labels: Tensor, k: int = 3) -> dict[str, float]:
    """Evaluate generated digits ``[n, 1, 8, 8]`` in [-1, 1] with their requested labels ``[n]``.

    All distances are between raw pixels, which suffices for 8×8 digits. :data:`BARS` holds the targets.
    Recall and spread matter most, because class means would also be recognized and precise.

    Returns:
        ``recognized``: fraction of samples that a classifier, trained on the training digits, assigns to
        their label. ``classifier``: the classifier's accuracy on held-out digits. ``precision_…`` and
        ``recall_…``: against held-out and against training digits. ``spread``: within-class spread relative
        to the training digits, averaged over classes. ``least_spread``: the spread of the worst class.
        ``copied``: see :func:`driftgen.evaluation.neighbors.copied_share`. ``samples``: n.
    """
    if samples.ndim != 4 or samples.shape[1:] != (1, 8, 8):
        raise InputError(f"samples has shape {list(samples.shape)}, expected [n, 1, 8, 8]")
    if labels.shape != samples.shape[:1]:
        raise InputError(f"labels has shape {list(labels.shape)}, expected [{len(samples)}]")
    if len(labels) and (labels.min() < 0 or labels.max() > 9):
        raise InputError(f"labels are {int(labels.min())} ... {int(labels.max())}, expected 0 ... 9")
    labels = labels.cpu()
    counts = torch.bincount(labels, minlength=10)
    if counts.min() < 2:
        raise InputError(
            f"labels holds {int(counts.min())} of digit {int(counts.argmin())}: give at least 2 of each"
        )
    images = as_rows("samples", samples, k + 1).cpu().clamp(-1, 1)
    (training, training_labels), (heldout, heldout_labels) = digits("train"), digits("heldout")
    classifier = DigitClassifier(training, training_labels)
    against_heldout = precision_recall(heldout, images, k)
    against_training = precision_recall(training, images, k)
    spread = within_class_spread(images, labels) / within_class_spread(training, training_labels)
    return {
        "recognized": float((classifier(images) == labels).double().mean()),
        "classifier": float((classifier(heldout) == heldout_labels).double().mean()),
        "precision_heldout": against_heldout.precision,
        "recall_heldout": against_heldout.recall,
        "precision_training": against_training.precision,
        "recall_training": against_training.recall,
        "spread": float(spread.mean()),
        "least_spread": float(spread.min()),
        "copied": copied_share(images, training, heldout),
        "samples": float(len(images)),
    }
