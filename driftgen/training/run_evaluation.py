"""Evaluation during training: a Fréchet distance of each average, every ``output.eval_every`` steps."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from driftgen.data.augment import without_augmentation
from driftgen.data.config import Augment
from driftgen.data.images import RealData
from driftgen.errors import InputError
from driftgen.evaluation.encoders import Encoder, load_encoder
from driftgen.evaluation.image_sources import GeneratedImages, RealImages
from driftgen.evaluation.reference import Reference, compute_reference, load_reference
from driftgen.evaluation.session import INCEPTION_VARIABLE, REFERENCE
from driftgen.evaluation.sweep import Evaluation
from driftgen.pipeline import DriftPipeline
from driftgen.support.distributed import Distributed
from driftgen.training.build import open_data
from driftgen.training.config import PretrainConfig, TrainConfig

__all__ = ["RunEvaluation", "open_without_augmentation"]

FOLDER = "evaluation"
REPORTED = ("precision", "recall", "inception_score")
EVALUATION_SEED = 0  # of the noise; the same at every step, so that curves are smooth


class RunEvaluation:
    """Scores the averages of a run against its training images.

    The encoder is ``output.eval_encoder``, else the FID Inception that ``DRIFTGEN_INCEPTION`` names, else the
    run's own first encoder, else pixels. The distance is called FID with the FID Inception only.

    Args:
        config: of the run.
        given: data that were passed from Python, or None.
        processes: that share the work.
        folder: of the run; holds the statistics of the training images for a resumed run.
        info: called with a message.
    """

    def __init__(
        self,
        config: TrainConfig,
        given: RealData | None,
        processes: Distributed,
        folder: Path,
        info: Callable[[str], None],
    ) -> None:
        self.config, self.processes = config, processes
        self.encoder = _choose_encoder(config, processes)
        self.reference = self._open_reference(given, folder, info)
        self.reference.check(self.encoder)

    def __call__(self, pipelines: Mapping[str, DriftPipeline]) -> dict[str, Any]:
        """Return ``{"metric": name, "samples": n, "ema": {decay: {name: value, "precision": ...}}}``."""
        name, samples = self.encoder.distance, self.config.output.eval_samples
        evaluation = Evaluation(self.reference, self.encoder, self.processes, quick=True)
        scores = {}
        for decay, pipe in pipelines.items():
            images = GeneratedImages(pipe, samples, self.config.output.sample_guidance, EVALUATION_SEED)
            row = evaluation.score(images, "")
            scores[decay] = {key: row[key] for key in (name, *REPORTED) if key in row}
        return {"metric": name, "samples": samples, "ema": scores}

    def _open_reference(self, given: RealData | None, folder: Path, info: Callable[[str], None]) -> Reference:
        stored = self.config.output.eval_reference
        if stored is not None:
            return load_reference(stored, self.encoder.device)
        if self.config.data.kind == "latents":
            raise InputError(
                "output.eval_every: the data are latents; set output.eval_reference to statistics of their "
                "images, from driftgen eval stats"
            )
        path = folder / FOLDER / REFERENCE
        if path.is_file():
            return load_reference(path, self.encoder.device)
        images = RealImages(open_without_augmentation(self.config, given), self.config.data.path or "data")
        info(f"statistics of {images.count:,} training images for {self.encoder.distance}")
        reference = compute_reference(images, self.encoder, self.processes)
        images.close()
        if self.processes.is_main:
            reference.save(path)
        self.processes.barrier()
        return reference


def open_without_augmentation(
    config: TrainConfig | PretrainConfig, given: RealData | None = None
) -> RealData:
    """Open the training data of a run without augmentation."""
    section = config.data.model_copy(update={"augment": Augment()})
    if given is not None and hasattr(given, "augment"):
        given = without_augmentation(given)
    return open_data(section, given)


def _choose_encoder(config: TrainConfig, processes: Distributed) -> Encoder:
    device = processes.device
    name = config.output.eval_encoder or os.environ.get(INCEPTION_VARIABLE)
    if name is None and config.encoders and config.tokenizer is None and config.data.kind != "latents":
        entry = config.encoders[0]
        name = entry.path if entry.kind == "mae" else None
    return load_encoder(name or "pixels", device)
