"""Train from Python: resolve a recipe with its changes, run the loop, and return the run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel
from torch import Tensor

from driftgen.data.images import RealData
from driftgen.data.in_memory import open_memory
from driftgen.errors import InputError, unknown_name
from driftgen.evaluation.digits import evaluate_digits
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.image_sources import RealImages
from driftgen.evaluation.precision_recall import precision_recall
from driftgen.evaluation.reference import compute_reference
from driftgen.evaluation.sweep import Evaluation, evaluate_model
from driftgen.model_io import find_model, load_weights, read_config
from driftgen.pipeline import DriftPipeline
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.support.atomic_write import atomic_write
from driftgen.support.checked_arguments import checked
from driftgen.support.distributed import Distributed, choose_device
from driftgen.support.folder_lock import check_not_held
from driftgen.support.provenance import provenance
from driftgen.support.rng import derive_generator
from driftgen.training.build import NO_PARTS, Parts, build_features, make_tokenizer
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.metrics_file import read_metrics
from driftgen.training.own_images import name_recipe, notes
from driftgen.training.policy_task import train_policy
from driftgen.training.pretrain import pretrain
from driftgen.training.recipes import Command, RunConfig, load_recipe
from driftgen.training.run_changes import resolve
from driftgen.training.run_evaluation import open_without_augmentation
from driftgen.training.run_folder import CHECKPOINTS, CONFIG, METRICS, recorded_init
from driftgen.training.run_start import (
    NO_PERMISSION,
    Permission,
    fresh_folder,
    place_compact_state,
    with_encoder,
)
from driftgen.training.stop_request import StoppedAfterLastStep, resume_hint
from driftgen.training.summary import resume_command
from driftgen.training.trainer import train
from driftgen.training.view import View

__all__ = ["Run", "recorded_init", "start_run"]

TRAININGS: dict[str, Callable[..., bool]] = {"train": train, "pretrain": pretrain, "policy": train_policy}
REPORT, EVALUATION = "report.html", "evaluation.json"


@dataclass(frozen=True)
class Run:
    """A training run on disk.

    Attributes:
        folder: folder of the run.
        parts: data and networks that were passed from Python.
        complete: False if the run was stopped before its last step; None if the run was opened later.
        write_report: writes the report again after an evaluation.
    """

    folder: Path
    parts: Parts = field(default=NO_PARTS, repr=False)
    complete: bool | None = None
    write_report: Callable[[Path], object] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        if not (self.folder / CONFIG).is_file():
            raise InputError(f"{self.folder} holds no run: {CONFIG} is missing")

    @property
    def config(self) -> RunConfig:
        """The resolved configuration."""
        return load_recipe(self.folder / CONFIG)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``, in the order of steps."""
        return read_metrics(self.folder / METRICS)[1]

    @property
    def report(self) -> Path:
        """Path of the HTML report."""
        return self.folder / REPORT

    def pipeline(self, **options: Any) -> DriftPipeline:
        """Load the trained generator; ``options`` are those of :meth:`DriftPipeline.from_pretrained`.

        A network that was passed from Python is loaded into a copy of that network.
        """
        network = self.parts.generator
        if network is None or self._train_config().fsdp:  # a sharded network cannot be copied
            return DriftPipeline.from_pretrained(self.folder, **options)
        place = find_model(str(self.folder), options.pop("weights", None))
        saved, network = read_config(place), copy.deepcopy(network).cpu()
        load_weights(network, place, checksums=saved.checksums if options.pop("verify", True) else None)
        device, dtype = options.pop("device", None), options.pop("dtype", None)
        facts = saved.model_dump(include={"class_names", "guidance", "source"})
        return DriftPipeline(network, **{**facts, **options}).to(device, dtype)

    def policy(self, **options: Any) -> DriftingPolicy:
        """Load the policy; ``options`` are those of :meth:`DriftingPolicy.from_pretrained`."""
        return DriftingPolicy.from_pretrained(self.folder, **options)

    def evaluate(
        self,
        samples: int = 1000,
        *,
        space: Literal["pixels", "features"] = "pixels",
        encoder: str | Path | None = None,
        guidance: float | None = None,
        seed: int = 0,
        k: int = 3,
        device: str | None = None,
        data: Any = None,
    ) -> dict[str, float]:
        """Measure generated samples against real ones, and record the result in ``evaluation.json``.

        A run on the packaged digits is measured by :func:`driftgen.evaluation.digits.evaluate_digits`. Any
        other run is measured by precision and recall against as many training samples, which depend on that
        number and on the space: compare equal settings only. With ``encoder``, the metrics are those of
        ``driftgen eval``: FID with the FID Inception, a Fréchet distance named after any other encoder.

        Args:
            samples: number of generated samples, spread evenly over the classes.
            space: distances between samples (``"pixels"``), or between the run's own encoder features,
                averaged over positions and concatenated (``"features"``).
            encoder: as in :func:`driftgen.evaluation.encoders.load_encoder`; replaces ``space``.
            guidance: α; the model's default if None.
            seed: seed of the noise and of the choice of training samples.
            k: neighbors that define a manifold.
            device: device of the generator and the encoders; the CPU if None.
            data: the training data again, for a run on data from Python that was opened later.
        """
        config = self._train_config()
        if space not in ("pixels", "features"):
            raise unknown_name("space", space, ("pixels", "features"))
        real = self._real_data(config, data)
        pipe = self.pipeline(device=device)
        if encoder is not None:
            processes = Distributed.start(device or "cpu")
            loaded = load_encoder(encoder, processes.device)
            reference = compute_reference(RealImages(real, config.data.path or "data"), loaded, processes)
            evaluation = Evaluation(reference, loaded, processes, command="driftgen.Run.evaluate")
            alphas = [] if guidance is None else [guidance]
            scored = evaluate_model(pipe, evaluation, samples=samples, guidance=alphas, seed=seed)
            real.close()
            return self._record({**scored, "figures": _figures(scored["rows"][0])})
        classes = len(real.class_names)
        labels = pipe.labels(list(range(classes)), max(samples, classes))
        output: Literal["latent", "tensor"] = "latent" if config.data.kind == "latents" else "tensor"
        generated = pipe(labels, guidance=guidance, seed=seed, output=output)
        digits = config.data.kind == "digits" and classes == 10 and real.shape == (1, 8, 8)
        if digits and space == "pixels":
            evaluator = "classifier and nearest neighbors on raw pixels of the packaged digits"
            figures = evaluate_digits(generated, torch.tensor(labels), k)
        else:
            chosen = torch.randperm(len(real.labels), generator=derive_generator(seed))[: len(labels)]
            training = real.load(chosen, seed)
            real.close()
            evaluator = f"precision and recall in {space}, k={k}, against {len(chosen)} training samples"
            if space == "features":
                generated, training = (self._features(config, x, device) for x in (generated, training))
            result = precision_recall(training, generated, k)
            figures = {"precision": result.precision, "recall": result.recall, "samples": float(len(labels))}
        record = {
            **provenance("driftgen.Run.evaluate"),
            "evaluator": evaluator,
            "guidance": pipe.guidance if guidance is None else guidance,
            "seed": seed,
            "network_calls_per_image": 1,
            "figures": figures,
        }
        return self._record(record)

    def _record(self, record: dict[str, Any]) -> dict[str, float]:
        """Write ``evaluation.json`` and the report, and return the figures."""
        with atomic_write(self.folder / EVALUATION) as scratch:
            scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if self.write_report is not None:
            self.write_report(self.folder)
        figures: dict[str, float] = record["figures"]
        return figures

    def _train_config(self) -> TrainConfig:
        config = self.config
        if not isinstance(config, TrainConfig):
            kind = "an encoder" if isinstance(config, PretrainConfig) else "a policy (see Run.policy)"
            raise InputError(f"{self.folder} is a run of driftgen {config.task}: it has {kind}, no generator")
        return config

    def _real_data(self, config: TrainConfig, data: Any) -> RealData:
        """Open the training data without augmentation."""
        given = self.parts.data if data is None else open_memory(data, config.data)[0]
        return open_without_augmentation(config, given)

    @torch.no_grad()
    def _features(self, config: TrainConfig, images: Tensor, device: str | None) -> Tensor:
        place = choose_device(device or "cpu")
        shape = (images.shape[1], images.shape[2], images.shape[3])
        tokenizer = make_tokenizer(config.tokenizer, place)
        phi = build_features(config, shape, tokenizer, place, given=self.parts.encoders)
        rows = []
        for batch in images.split(256):
            features = phi.features(batch.to(place))
            rows.append(torch.cat([value.float().mean(dim=1) for value in features.values()], dim=1).cpu())
        return torch.cat(rows)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


@checked
def start_run(
    task: Command,
    recipe: str | Path | RunConfig,
    out: str | Path | None,
    *,
    view: Callable[..., AbstractContextManager[View]],
    report: Callable[[Path], object] | None = None,
    name: str | None = None,
    data: Any = None,
    generator: Any = None,
    encoders: Any = None,
    init: str | Path | None = None,
    state: str | Path | None = None,
    device: str | torch.device | None = None,
    override: bool = False,
    size: str | None = None,
    permission: Permission = NO_PERMISSION,
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """Train, or resume, a run in this process; ``torchrun`` starts several. See :func:`driftgen.train`.

    ``view`` shows the run in the terminal and ``report`` writes its page: both belong to a room that knows
    this one, so the caller passes them.
    """
    given = {"data": data, "generator": generator, "encoders": encoders, "init": init}
    values = {**(changes or {}), **{k: v for k, v in given.items() if v is not None}}
    implied: tuple[str, ...] = ()
    if isinstance(recipe, BaseModel):
        name = name or task
    else:
        recipe, implied, own_name = name_recipe(recipe, task)
        name = name or own_name
    place = None if device is None else str(device)
    options: dict[str, Any] = {"size": size, "folder": None if out is None else Path(out), "device": place}
    config, parts = resolve(task, recipe, values, implied, **options)
    from rich.console import Console
    from rich.text import Text

    processes = Distributed.start(place)
    console = Console(stderr=True, highlight=False, quiet=not processes.is_main)
    begun: list[tuple[RunConfig, Path, str]] = []  # configuration, folder and name: an encoder, then the run
    hint = resume_hint(
        lambda: begun[-1][1] if begun else None,
        lambda: resume_command(begun[-1][0].task, begun[-1][2], begun[-1][1]),
        lambda text: console.print(Text(text), soft_wrap=True),
    )
    try:
        with hint:
            folder = Path(out) if out is not None else fresh_folder(name, processes)
            told: set[str] = set()  # notes that the first of two parts printed

            def run(config: RunConfig, folder: Path, name: str, state: str | Path | None = None) -> bool:
                temperatures = () if isinstance(config, PretrainConfig) else config.loss.temperatures
                shared: dict[str, Any] = {"name": name, "override": override, "report": report}
                processes.run_main(partial(check_not_held, folder))
                begun.append((config, folder, name))
                with view(str(folder), config.optim.steps, temperatures, console=console) as shown:
                    for line in [line for line in notes(config, folder) if line not in told]:
                        told.add(line)
                        shown.info(line)
                    if state is not None:
                        place_compact_state(state, folder, config, override, processes, shown)
                    if isinstance(config, TrainConfig):
                        config = recorded_init(config, folder, shown)
                    recall = getattr(shown, "recall", None)
                    if recall is not None and processes.is_main:
                        recall(folder / METRICS, max(Checkpoints(folder / CHECKPOINTS).steps, default=0))
                    return TRAININGS[config.task](config, folder, processes, shown, parts=parts, **shared)

            if isinstance(config, TrainConfig):
                run_first = partial(run, name="mae-folder")
                chosen = with_encoder(config, folder, processes, parts, permission, run_first)
                if isinstance(chosen, Path):
                    return Run(chosen, parts, False, report)
                config = chosen
            try:
                complete = run(config, folder, name, state)
            except StoppedAfterLastStep:
                begun.clear()  # nothing is left to resume
                raise
    finally:
        processes.close()
    return Run(folder, parts, complete, report)
