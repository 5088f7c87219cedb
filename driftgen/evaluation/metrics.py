"""All metrics of generated images against a reference, from the sums of both."""

from __future__ import annotations

import threading
import warnings
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.evaluation.accumulate import Sums
from driftgen.evaluation.density_coverage import density_coverage
from driftgen.evaluation.encoders import Encoder
from driftgen.evaluation.frechet import Moments, frechet_distance
from driftgen.evaluation.precision_recall import precision_recall
from driftgen.evaluation.reference import Reference

__all__ = ["compare", "expected_bias", "kernel_distance", "preload", "require_torchmetrics"]

KID_SUBSETS, KID_SIZE = 100, 1000
NEIGHBORS, COVERAGE_NEIGHBORS = 3, 5


def compare(sums: Sums, reference: Reference, encoder: Encoder, *, quick: bool = False) -> dict[str, Any]:
    """Return the metrics of generated images.

    - ``FID`` (or ``FD-ENCODER`` for any other encoder): Fréchet distance to the reference;
    - ``KID`` (``KD-ENCODER``), ``KID_std``: kernel distance, mean and standard deviation over subsets;
    - ``inception_score``, ``inception_score_std``: with an Inception file that has a classifier;
    - ``precision``, ``recall``: k = 3; ``density``, ``coverage``: k = 5;
    - ``compared``: generated and real images of KID, precision, recall, density and coverage.

    ``quick`` leaves out KID, density and coverage.
    """
    assert sums.features is not None
    generated, real = sums.features, reference.features.to(sums.features.device)
    kernel = encoder.distance.replace("FID", "KID").replace("FD-", "KD-")
    row: dict[str, Any] = {encoder.distance: frechet_distance(sums.moments, reference.moments)}
    if not quick:
        row[kernel], row[f"{kernel}_std"] = kernel_distance(real, generated)
    score = sums.inception_score
    if score is not None:
        row["inception_score"], row["inception_score_std"] = score
    row["precision"], row["recall"] = precision_recall(real, generated, NEIGHBORS)
    if not quick:
        row["density"], row["coverage"] = density_coverage(real, generated, COVERAGE_NEIGHBORS)
    return row | {"samples": sums.count, "compared": [len(generated), len(real)]}


def kernel_distance(real: Tensor, generated: Tensor) -> tuple[float, float]:
    """Kernel distance, the unbiased squared MMD with kernel (xᵀy / D + 1)³: mean and standard deviation.

    Over 100 random subsets of at most 1,000 samples, with a fixed seed.
    """
    require_torchmetrics()
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(KID_SIZE, len(real), len(generated))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it stores all features: they are bounded here
        metric = KernelInceptionDistance(
            _FeatureInput(real.shape[1]), subsets=KID_SUBSETS, subset_size=size, sync_on_compute=False
        ).to(real.device)
    metric.update(real.double(), real=True)
    metric.update(generated.double(), real=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        mean, std = metric.compute()
    return float(mean), float(std)


def require_torchmetrics() -> None:
    """Raise InputError if torchmetrics is missing."""
    if find_spec("torchmetrics") is None:
        raise InputError("KID needs torchmetrics: pip install 'driftgen[eval]'", topic="missing-extra")


def preload() -> None:
    """Import torchmetrics in the background: it imports much of what is installed beside it.

    Raise InputError if it is missing, before any image is generated.
    """
    require_torchmetrics()
    threading.Thread(target=_import_torchmetrics, daemon=True).start()


def _import_torchmetrics() -> None:
    with suppress(ImportError):
        import_module("torchmetrics.image.kid")


class _FeatureInput(nn.Module):
    """Stand-in for torchmetrics' network: its input already is the features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features

    def forward(self, features: Tensor) -> Tensor:
        return features


def expected_bias(count: int, reference: Reference) -> float | None:
    """Return the Fréchet distance of ``count`` real images to all of them: the bias of so few samples.

    None if the reference stores fewer features.
    """
    if count > len(reference.features) or count < 2:
        return None
    return frechet_distance(Moments.of(reference.features[:count]), reference.moments)
