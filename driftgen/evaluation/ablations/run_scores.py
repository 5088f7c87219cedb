"""The score of one run: the only place that says how the runs of a study are measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftgen.data.config import Augment, Data
from driftgen.data.images import digits, open_images
from driftgen.errors import InputError, NotFiniteError
from driftgen.evaluation.digits import evaluate_digits
from driftgen.evaluation.encoders import Encoder, load_encoder
from driftgen.evaluation.frechet import Moments, frechet_distance
from driftgen.evaluation.precision_recall import precision_recall
from driftgen.pipeline import DriftPipeline
from driftgen.support.images import rounded_bytes, to_uint8

__all__ = ["RunScorer"]

SEED = 0  # of the noise of scored samples
BATCH = 500
LEAST = 20  # samples: two of each digit
NEIGHBORS = 3
MANIFOLD = 10_000  # real and generated samples of precision and recall


class RunScorer:
    """Scores the runs of a study on one set of data with one evaluator.

    Packaged digits: Fréchet distance against all digits (training and held out), precision and recall
    against the held-out digits, ``recognized`` and ``diversity`` of
    :func:`~driftgen.evaluation.digits.evaluate_digits`. Other images: Fréchet distance against all training
    images; precision and recall, k = 3, against at most 10,000 of them.

    Args:
        data: the data of the study; augmentation is ignored.
        samples: generated samples of a run, spread evenly over the classes.
        evaluator: ``pixels``, the file of the FID Inception, or a trained encoder; see
            :func:`~driftgen.evaluation.encoders.load_encoder`.
        device: of the evaluator and of the generators.
    """

    def __init__(
        self, data: Data, samples: int, evaluator: str = "pixels", device: str | torch.device = "cpu"
    ) -> None:
        if samples < LEAST:
            raise InputError(f"samples={samples} must be at least {LEAST}")
        self.data = data.model_copy(update={"augment": Augment()})
        self.samples, self.device = samples, torch.device(device)
        self.encoder: Encoder = load_encoder(evaluator, self.device)
        self.is_digits = data.kind == "digits" and data.size in (None, 8) and data.limit is None

    @property
    def distance(self) -> str:
        """Name of the Fréchet distance."""
        return self.encoder.distance

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the figures of a run, for records."""
        against = "training and held-out digits" if self.is_digits else "training images"
        return {
            **self.encoder.identity,
            "distance": f"{self.distance}: Fréchet distance of {self.samples} samples to {against}",
            "precision_recall": f"k={NEIGHBORS}, against "
            + ("held-out digits, raw pixels" if self.is_digits else f"up to {MANIFOLD} training images"),
            "samples": self.samples,
            "seed": SEED,
        }

    def __call__(self, folder: Path, guidance: Sequence[float]) -> dict[str, dict[str, float]]:
        """Return the metrics of the run's averaged model at each guidance α.

        Raises:
            NotFiniteError: if a sample is NaN or infinite.
        """
        pipe = DriftPipeline.from_pretrained(folder, device=self.device, batch_size=BATCH)
        labels = pipe.labels(None, self.samples)
        return {f"{alpha:g}": self._score(pipe, labels, alpha) for alpha in guidance}

    def _score(self, pipe: DriftPipeline, labels: list[int], alpha: float) -> dict[str, float]:
        samples: Tensor = pipe(labels, guidance=alpha, seed=SEED, output="tensor")
        if not samples.isfinite().all():
            raise NotFiniteError("generated samples are NaN or infinite")
        pixels = torch.from_numpy(to_uint8(samples)).permute(0, 3, 1, 2)  # truncated, as in the release
        features = self._encode(pixels)
        moments, real = self.reference
        figures = {self.distance: frechet_distance(Moments.of(features), moments)}
        if self.is_digits:
            found = evaluate_digits(samples.cpu(), torch.tensor(labels), NEIGHBORS)
            figures["precision"], figures["recall"] = found["precision_heldout"], found["recall_heldout"]
            return figures | {"recognized": found["recognized"], "diversity": found["spread"]}
        result = precision_recall(real, features[:MANIFOLD], NEIGHBORS)
        return figures | {"precision": result.precision, "recall": result.recall}

    @cached_property
    def reference(self) -> tuple[Moments, Tensor]:
        """Moments of all real images, and features of some of them for precision and recall."""
        if self.is_digits:
            features = self._encode(rounded_bytes(digits("all")[0]))
            return Moments.of(features), features
        data = open_images(self.data)
        try:
            # In a fixed random order: the images of a file may be sorted by class.
            order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(SEED))
            total: Moments | None = None
            kept: list[Tensor] = []
            for chosen in order.split(BATCH):
                features = self._encode(rounded_bytes(data.load(chosen, SEED)))
                total = Moments.of(features) if total is None else total + Moments.of(features)
                if sum(map(len, kept)) < MANIFOLD:
                    kept.append(features)
        finally:
            data.close()
        assert total is not None
        return total, torch.cat(kept)[:MANIFOLD]

    def _encode(self, pixels: Tensor) -> Tensor:
        """Return features of uint8 images."""
        return torch.cat([self.encoder(part) for part in pixels.split(BATCH)])
