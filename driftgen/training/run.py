"""Train from Python: resolve a recipe with its changes, run the loop, and return the run."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import BaseModel
from torch import Tensor, nn

from driftgen.data.hf_datasets import is_dataset_dict
from driftgen.data.images import RealData
from driftgen.data.in_memory import open_memory
from driftgen.errors import InputError, unknown_name
from driftgen.evaluation.digits import evaluate_digits
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.image_sources import RealImages
from driftgen.evaluation.precision_recall import precision_recall
from driftgen.evaluation.reference import compute_reference
from driftgen.evaluation.sweep import Evaluation, evaluate_model
from driftgen.model_io import find_model, load_weights, read_config, register_generator, registered_name
from driftgen.pipeline import DriftPipeline
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.support.atomic_write import atomic_write
from driftgen.support.distributed import Distributed
from driftgen.support.provenance import provenance
from driftgen.support.rng import derive_generator
from driftgen.training.build import NO_PARTS, Parts, build_features, make_tokenizer
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.compact_state import place_state
from driftgen.training.config import MODULE, PretrainConfig, TrainConfig
from driftgen.training.metrics_file import read_metrics
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.policy_data import with_episodes
from driftgen.training.policy_task import train_policy
from driftgen.training.pretrain import pretrain
from driftgen.training.recipes import COMMANDS, Command, RunConfig, config_class, load_recipe, to_yaml
from driftgen.training.run_evaluation import open_without_augmentation
from driftgen.training.run_folder import CHECKPOINTS, CONFIG, METRICS, check_run
from driftgen.training.task import View
from driftgen.training.trainer import train

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
        load_weights(network, place)
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
        place = torch.device(device or "cpu")
        shape = (images.shape[1], images.shape[2], images.shape[3])
        tokenizer = make_tokenizer(config.tokenizer, place)
        phi = build_features(config, shape, tokenizer, place, given=self.parts.encoders)
        rows: list[Tensor] = []
        for features in (phi.features(batch.to(place)) for batch in images.split(256)):
            rows.append(torch.cat([value.float().mean(dim=1) for value in features.values()], dim=1).cpu())
        return torch.cat(rows)


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in row.items() if isinstance(value, int | float)}


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
    changes: Mapping[str, Any] | None = None,
) -> Run:
    """Train, or resume, a run in this process; ``torchrun`` starts several. See :func:`driftgen.train`.

    ``view`` shows the run in the terminal and ``report`` writes its page: both belong to a room that knows
    this one, so the caller passes them.
    """
    given = {"data": data, "generator": generator, "encoders": encoders, "init": init}
    given = {key: value for key, value in given.items() if value is not None}
    config, parts = resolve(task, recipe, {**(changes or {}), **given})
    name = name or (task if isinstance(recipe, BaseModel) else Path(recipe).stem)
    processes = Distributed.start(None if device is None else str(device))
    try:
        folder = Path(out) if out is not None else _fresh_folder(name, processes)
        temperatures = () if isinstance(config, PretrainConfig) else config.loss.temperatures
        from rich.console import Console

        console = Console(stderr=True, highlight=False, quiet=not processes.is_main)
        with view(str(folder), config.optim.steps, temperatures, console=console) as shown:
            options: dict[str, Any] = {"name": name, "override": override, "report": report, "parts": parts}
            if state is not None:
                _place_state(state, folder, config, override, processes, shown)
            if isinstance(config, TrainConfig):
                config = recorded_init(config, folder, shown)
            complete = TRAININGS[config.task](config, folder, processes, shown, **options)
    finally:
        processes.close()
    return Run(folder, parts, complete, report)


def resolve(task: Command, recipe: Any, changes: Mapping[str, Any]) -> tuple[RunConfig, Parts]:
    """Return the configuration of a recipe with its changes, and the parts that were passed from Python."""
    values, data, networks = dict(changes), None, {}
    if not isinstance(values.get("data", {}), Mapping) or is_dataset_dict(values.get("data")):
        data = values.pop("data")
    if isinstance(data, str | Path):
        values, data = {"data.path": str(data), **values}, None
    generator = values.get("generator")
    if generator is not None and not isinstance(generator, Mapping):
        if not isinstance(generator, nn.Module):
            raise InputError(
                f"generator is a {type(generator).__name__}: pass a torch.nn.Module or a dict of values"
            )
        values["generator"] = {"kind": MODULE, "preset": None, "options": _identity(generator)}
        networks["generator"] = generator
    modules: list[nn.Module] = []
    if values.get("encoders") is not None:
        listed = values["encoders"]
        listed = listed if isinstance(listed, list) else [listed]
        values["encoders"] = [_encoder_entry(entry, modules) for entry in listed]
    if values.get("init") is not None:
        values["init"] = str(values["init"])
    model = type(recipe) if isinstance(recipe, BaseModel) else config_class(recipe, task)
    overrides = [f"{key}={_yaml(key, value)}" for key, value in _flatten(model, values)]
    config = _load(recipe, overrides, task)
    if isinstance(config, PolicyConfig):
        return with_episodes(config, data, "data.path" in values)
    if "data.path" in values and config.data.kind in ("digits", "memory"):
        config = config.model_copy(update={"data": config.data.model_copy(update={"kind": "images"})})
    opened = None
    if data is not None:
        section = config.data
        if not any(key == "data.size" for key, _ in _flatten(model, values)):
            section = section.model_copy(update={"size": None})  # arrays have a size of their own
        opened, section = open_memory(data, section, config.data.size)
        config = config.model_copy(update={"data": section})
    if "generator" in networks:
        _register_own(networks["generator"])
    return config, Parts(opened, networks.get("generator"), tuple(modules))


def _load(recipe: str | Path | RunConfig, overrides: Sequence[str], task: Command) -> RunConfig:
    if not isinstance(recipe, BaseModel):
        return load_recipe(recipe, overrides, task)
    if recipe.task not in COMMANDS[task]:
        raise InputError(f"recipe is a configuration for {recipe.task}: pass it to driftgen.{recipe.task}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(to_yaml(recipe), encoding="utf-8")
        return load_recipe(path, overrides, task)


def _flatten(model: type[BaseModel], values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values. A dict for a section changes single keys of it; other values replace."""
    for key, value in values.items():
        found = model.model_fields.get(key)
        section = found.annotation if found is not None else None
        if isinstance(value, Mapping) and isinstance(section, type) and issubclass(section, BaseModel):
            yield from ((f"{key}.{inner}", v) for inner, v in _flatten(section, value))
        else:
            yield key, value


def _yaml(key: str, value: Any) -> str:
    """Return a value as JSON, which is YAML on one line."""
    try:
        return json.dumps(
            value, ensure_ascii=False, default=lambda v: v.item() if hasattr(v, "item") else str(v)
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"{key}={value!r} is not a value of a recipe: {error}") from None


def _encoder_entry(entry: Any, modules: list[nn.Module]) -> dict[str, Any]:
    """Return the recipe's entry for one encoder; append the encoder to ``modules`` if it is a network."""
    if isinstance(entry, Mapping):
        return dict(entry)
    if isinstance(entry, str | Path):
        return {"kind": "mae", "path": str(entry)}
    encoder, switches = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, {})
    if not isinstance(encoder, nn.Module) or not callable(getattr(encoder, "features", None)):
        raise InputError(
            f"encoders: {type(encoder).__name__} is not an encoder: pass a torch.nn.Module with features(x), "
            "a path, or a dict of recipe values"
        )
    modules.append(encoder)
    return {"kind": MODULE, "options": _identity(encoder), "switches": dict(switches)}


def _identity(network: nn.Module) -> dict[str, Any]:
    """Return the record of a network from Python: a run resumes with the same kind of network only."""
    return {"class": type(network).__qualname__, "parameters": sum(p.numel() for p in network.parameters())}


def _register_own(network: nn.Module) -> None:
    """Register the class of a network from Python under its own name, so that its weights can be saved."""
    cls = type(network)
    if registered_name(cls) is None and callable(getattr(cls, "sample_noise", None)):
        register_generator(cls.__name__, cls)


def _place_state(
    state: str | Path, folder: Path, config: RunConfig, override: bool, processes: Distributed, view: View
) -> None:
    """Place a compact state into the run's folder, if the run has this configuration."""
    if processes.is_main:
        path = Path(state) / CONFIG
        if path.is_file() and not Checkpoints(folder / CHECKPOINTS).steps:
            if isinstance(config, TrainConfig) and config.init is None:
                config = config.model_copy(update={"init": getattr(load_recipe(path), "init", None)})
            check_run(Path(state), config, override=override)
        place_state(state, folder, view)
    processes.barrier()


def recorded_init(config: TrainConfig, folder: Path, view: View) -> TrainConfig:
    """Return the configuration with the ``init`` that the run in ``folder`` started from, if there is one."""
    if not (folder / CONFIG).is_file() or not Checkpoints(folder / CHECKPOINTS).steps:
        return config
    recorded = load_recipe(folder / CONFIG)
    if config.init is not None:
        view.info(f"{folder} has a checkpoint: resuming it, init={config.init} is ignored")
    return config.model_copy(update={"init": getattr(recorded, "init", None)})


def _fresh_folder(name: str, processes: Distributed) -> Path:
    """Return a folder in ``runs`` that does not exist yet; all processes agree on it."""
    folder, i = Path("runs") / name, 1
    while folder.exists():
        i += 1
        folder = Path("runs") / f"{name}-{i}"
    if processes.group is not None:
        shared: list[Any] = [folder]
        dist.broadcast_object_list(shared, src=0, group=processes.group)
        folder = shared[0]
    return folder
