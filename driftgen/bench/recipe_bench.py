"""``driftgen bench step --recipe`` and ``driftgen bench pretrain``: the step of a recipe as training runs it.

Images are random, and so are the weights of the encoders that the recipe names: neither changes the time.
Loading and augmenting the images is part of a step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.bench.cards import card_of
from driftgen.bench.clock import Timing, free, timed
from driftgen.bench.memory import count_bytes
from driftgen.bench.profiler import Cost, Phases, profile_step
from driftgen.bench.record import Row, least_time
from driftgen.bench.step_bench import REFERENCE_REPEATS, count_operations, count_step_operations
from driftgen.bench.switches import without_op
from driftgen.errors import InputError
from driftgen.features import resnet_layers
from driftgen.model_io import save_model
from driftgen.ops.dispatch import without_kernels
from driftgen.support.distributed import Distributed
from driftgen.training.build import build_mae
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.ema import EMA
from driftgen.training.graphed_step import GraphedStep
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.pretrain import Pretraining
from driftgen.training.recipes import load_recipe, recipe_names
from driftgen.training.trainer import Training
from driftgen.training.update import Update

__all__ = [
    "RecipeCase",
    "RecipeStep",
    "count_references",
    "default_recipe",
    "measure_recipe",
    "profile_recipe",
]

Config = TrainConfig | PretrainConfig
Task = Literal["train", "pretrain"]
IMAGES_OF_A_CLASS, PRETRAIN_CLASSES, DEFAULT_SIDE = 200, 10, 32
WARMUP = 3


@dataclass(frozen=True)
class RecipeCase:
    """A recipe with changes ``KEY=VALUE``; ``without`` names an op of ``driftgen.ops`` to switch off."""

    recipe: str
    task: Task
    changes: tuple[str, ...] = ()
    without: str | None = None
    contiguous_upsampling: bool = field(default=False, kw_only=True)

    def check(self) -> None:
        """Raise an InputError if the recipe or a change is wrong, before anything is measured."""
        _check_data(self._config())

    def load(self, folder: Path) -> Config:
        """Return the configuration, with random images and encoders in ``folder``."""
        config = self._config()
        synthetic = _write_data(folder, config)
        if isinstance(config, TrainConfig) and config.encoders:
            synthetic.append(f"encoders=[{', '.join(_write_encoders(folder, config))}]")
        # Changes of the caller come last, so that they can name other data or encoders.
        return self._config(*synthetic)

    def _config(self, *first: str) -> Config:
        config = load_recipe(self.recipe, [*first, *self.changes], self.task)
        if isinstance(config, PolicyConfig):
            raise InputError(
                f"{self.recipe} trains a policy: measure it with driftgen policy train --dry-run"
            )
        return config


def default_recipe(task: Task, device: torch.device) -> str:
    """Return the recipe to measure if none is given: CIFAR-10 on a GPU, 8x8 digits on the CPU."""
    name = "cifar10" if device.type == "cuda" else "digits"
    return name if task == "train" else f"mae-{name}"


def _check_data(config: Config) -> None:
    if config.data.kind == "latents" or config.tokenizer is not None:
        raise InputError(
            f"data.kind={config.data.kind}: only recipes of images are measured; "
            "for latents run driftgen bench step without --recipe"
        )


def _write_data(folder: Path, config: Config) -> list[str]:
    _check_data(config)
    data = config.data
    if data.kind == "digits" or data.path is not None:
        return []
    classes = config.batch.classes if isinstance(config, TrainConfig) else PRETRAIN_CLASSES
    side, rng = data.size or DEFAULT_SIDE, np.random.default_rng(0)
    images = rng.integers(0, 256, (IMAGES_OF_A_CLASS * classes, side, side, data.channels), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(len(images)) % classes)
    return [f"data.path={folder / 'images.npz'}"]


def _write_encoders(folder: Path, config: TrainConfig) -> Iterator[str]:
    """Write each encoder as its pretraining recipe builds it; ``runs/mae-cifar10`` names ``mae-cifar10``."""
    side = config.data.size or DEFAULT_SIDE
    known = {recipe.name for recipe in recipe_names()}
    for i, entry in enumerate(config.encoders):
        path = entry.path
        name = Path(path or "").name
        if entry.kind == "mae" and name in known:
            pretraining = load_recipe(name, task="pretrain")
            assert isinstance(pretraining, PretrainConfig)
            encoder = build_mae(pretraining.mae, (config.data.channels, side, side), config.batch.classes)
            path = str(folder / f"encoder-{i}")
            save_model(encoder, Path(path))
        yield json.dumps(entry.model_dump(mode="json") | {"path": path})


class RecipeStep:
    """One step of a recipe as the training loop runs it: gradient, clip, AdamW, EMA, and the next draw."""

    def __init__(self, config: Config, device: torch.device, phases: Phases | None = None) -> None:
        self.config, self.phases, self.notes = config, phases, list[str]()
        processes = Distributed.start(str(device))
        self.task: Training | Pretraining
        if isinstance(config, TrainConfig):
            self.task = Training(config, processes, self.notes.append)
            if phases is not None:
                phases.watch(self.task.generator, self.task.phi, self.task.step.loss)
        else:
            self.task = Pretraining(config, processes)
        self.ema = EMA(self.task.model, config.ema, warmup=config.ema_warmup)
        if phases is not None:
            draw = self.task.draw_ahead

            def marked(step: int) -> None:
                self._begin("data")
                draw(step)
                self._begin("optimizer")

            self.task.draw_ahead = marked  # type: ignore[method-assign]
        self.update = Update(self.task, config.optim, self.ema)
        self.losses: list[float | None] = []  # None for skipped steps

    def run(self) -> None:
        step = len(self.losses)
        self._begin("network" if isinstance(self.task, Pretraining) else "other")
        gradient = self.update.compute_gradient(step)
        self._begin("optimizer")
        loss = None if gradient is None else self.update.apply(step, *gradient)[0]
        self.losses.append(loss)

    def samples(self) -> int:
        return self.task.samples_per_step

    def cuda_graph(self) -> bool:
        """Return True if training captures the step as a CUDA graph, as far as is known before it tries."""
        graphed = self.task.compute if isinstance(self.task, Training) else self.task.graphed
        return isinstance(graphed, GraphedStep) and graphed.capturable

    def held_bytes(self) -> int:
        """Bytes of the weights and their averages."""
        networks = [self.task.model, *self.ema.models.values()]
        if isinstance(self.task, Training):
            networks.append(self.task.phi)
        return count_bytes(tensor for network in networks for tensor in network.state_dict().values())

    def operations(self) -> float:
        """Count the operations of a step."""
        if isinstance(self.task, Training):
            b = self.task.config.batch
            sizes = b.classes, b.generated, b.positives, b.unconditional
            cached = self.task.cache is not None
            encoders, phi = self.task.encoders, self.task.phi
            steps = [encoders.entries(step) for step in range(max(1, encoders.count))]
            counts = [
                count_step_operations(
                    self.task.generator, partial(phi.features, only=used), *sizes, cached=cached
                )
                for used in steps
            ]
            return sum(counts) / len(counts)
        mae = self.task.mae
        shape = (1, *self.task.data.shape)
        image = torch.randn(shape, device=self.task.distributed.device)
        # Backward costs two forward passes.
        return 3 * self.samples() * float(count_operations(lambda: mae(image)))

    def close(self) -> None:
        self.task.data.close()

    def _begin(self, phase: str) -> None:
        if self.phases is not None:
            self.phases.begin(phase)


def measure_recipe(
    cases: Sequence[RecipeCase],
    device: torch.device,
    repeats: int,
    on_row: Callable[[int, float], None] = lambda done, seconds: None,
) -> list[Row]:
    """Measure the step of each case beside references of the same run.

    The references are the step without compilation, CUDA graph and Triton kernels and, for pretraining on a
    GPU, the step with upsampling of contiguous maps.
    """
    first, rows, done = cases[0], [], 0

    def count(timing: Timing | None) -> None:
        nonlocal done
        done += 1
        on_row(done, 0.0 if timing is None else timing.seconds)

    references: dict[str, Timing | None] = {}
    for name, case in _references(first, device):
        with without_kernels() if name == "eager" else nullcontext():
            references[name], _ = _time_case(case, device, min(repeats, REFERENCE_REPEATS))
        count(references[name])
    operations = _count_operations(first, device)
    for case in cases:
        timing, figures = _time_case(case, device, repeats)
        count(timing)
        rows.append(_row(case, device, timing, references, operations, figures))
    return rows


def count_references(task: Task, device: torch.device) -> int:
    """Return how many references :func:`measure_recipe` measures."""
    return 2 if task == "pretrain" and device.type == "cuda" else 1


def _references(case: RecipeCase, device: torch.device) -> list[tuple[str, RecipeCase]]:
    contiguous = replace(case, without=None, contiguous_upsampling=True)
    return [("eager", _eager(case)), ("contiguous", contiguous)][: count_references(case.task, device)]


def _eager(case: RecipeCase) -> RecipeCase:
    return replace(case, changes=(*case.changes, "compile=false", "cuda_graph=false"), without=None)


def _count_operations(case: RecipeCase, device: torch.device) -> float:
    with tempfile.TemporaryDirectory() as folder:
        built = RecipeStep(_eager(case).load(Path(folder)), device)
        operations = built.operations()
        built.close()
    del built
    free(device)
    return operations


def _row(
    case: RecipeCase,
    device: torch.device,
    timing: Timing | None,
    references: dict[str, Timing | None],
    operations: float,
    figures: dict[str, Any],
) -> Row:
    samples = figures["samples_per_step"]
    dtype = torch.bfloat16 if figures["precision"] == "bfloat16" else torch.float32
    words = ["compiled"] * figures["compile"] + ["CUDA graph"] * figures["cuda_graph"]
    detail = ", ".join(words or ["eager"]) if case.without is None else f"without {case.without}"
    if timing is not None:
        rate = 1 / (timing.queued_seconds or timing.seconds)
        figures |= {"steps_per_second": rate, "samples_per_second": samples * rate}
    return Row(
        f"{case.recipe} x {samples}",
        detail,
        timing,
        references,
        floor=least_time(card_of(device), moved=0, operations=operations, dtype=dtype),
        held_bytes=figures.pop("held_bytes"),
        images=samples,
        more={"recipe": case.recipe, "changes": list(case.changes), "without": case.without, **figures},
    )


def _time_case(case: RecipeCase, device: torch.device, repeats: int) -> tuple[Timing | None, dict[str, Any]]:
    """Return the timing, None if out of memory, and further figures of the step."""
    torch.compiler.reset()
    timing, built = None, None
    with tempfile.TemporaryDirectory() as folder, _switched(case):
        config = case.load(Path(folder))
        start = time.perf_counter()
        built = RecipeStep(config, device)
        graph = built.cuda_graph()
        figures: dict[str, Any] = {
            "samples_per_step": built.samples(),
            "held_bytes": built.held_bytes(),
            "precision": config.precision,
            "compile": config.compile,
            "build_seconds": time.perf_counter() - start,
        }
        with suppress(torch.cuda.OutOfMemoryError):
            options: dict[str, Any] = {"meter": not config.compile, "cold_peak": graph, "least_seconds": 0}
            timing = timed(built.run, device, repeats, WARMUP, **options)
        figures |= {"cuda_graph": built.cuda_graph(), "notes": built.notes}
        figures["losses"] = built.losses[:1] + built.losses[-1:]
        built.close()
    built = None
    free(device)
    return timing, figures


def profile_recipe(case: RecipeCase, device: torch.device, steps: int = 3) -> list[Cost]:
    """Profile the step of a recipe without a CUDA graph, since only single launches belong to a part."""
    changes = (*case.changes, "cuda_graph=false")
    with tempfile.TemporaryDirectory() as folder, _switched(case):
        built = RecipeStep(replace(case, changes=changes).load(Path(folder)), device, Phases())
        for _ in range(2):
            built.run()
        costs = profile_step(built.run, device, steps)
        built.close()
    return costs


@contextmanager
def _switched(case: RecipeCase) -> Iterator[None]:
    """Switch the op of ``case.without`` off; upsample contiguous maps if the case asks for that."""
    upsample = resnet_layers.upsample
    if case.contiguous_upsampling:
        resnet_layers.upsample = _contiguous_upsample
    try:
        with without_op(case.without):
            yield
    finally:
        resnet_layers.upsample = upsample


def _contiguous_upsample(x: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(x.contiguous(), size=size, mode="bilinear", align_corners=False)
