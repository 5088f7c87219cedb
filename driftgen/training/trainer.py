"""``driftgen train``: train a one-step generator of images (appendix "Training Loop")."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from driftgen.data.class_batches import StepSizes, open_source
from driftgen.data.placement import is_on_gpu, place_data
from driftgen.drift.guidance import sample_alpha
from driftgen.drift.loss import DriftingLoss
from driftgen.interop.run_models import model_folders
from driftgen.model_io import RUN_MODEL, read_config
from driftgen.ops.compile import compile_parts, to_channels_last
from driftgen.pipeline import DriftPipeline
from driftgen.support.atomic_write import atomic_folder
from driftgen.support.distributed import Distributed
from driftgen.support.rng import RNGState, derive_generator, derive_seed
from driftgen.training.build import (
    NO_PARTS,
    Parts,
    build_features,
    build_generator,
    load_initial_weights,
    make_tokenizer,
    open_data,
)
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import TrainConfig
from driftgen.training.encoder_pool import StepEncoders
from driftgen.training.feature_cache import CachedRows, choose_images, open_cache
from driftgen.training.graphed_step import GraphedStep, can_capture
from driftgen.training.health import Health, never_trained
from driftgen.training.loop import run_task
from driftgen.training.microbatch import MicroBatchedStep
from driftgen.training.previews import NEAREST, REAL, save_nearest, save_real, save_samples
from driftgen.training.run_evaluation import RunEvaluation
from driftgen.training.run_folder import CHECKPOINTS, check_run
from driftgen.training.sharding import make_mesh
from driftgen.training.shared_crops import SharedCrops
from driftgen.training.step import DriftStep
from driftgen.training.step_inputs import StepInputs, StepOutput, guided_inputs
from driftgen.training.step_memory import check_step, memory_advice
from driftgen.training.step_metrics import CLASSES, measure, measure_spread
from driftgen.training.summary import data_origin, describe_training
from driftgen.training.unreadable_images import UnreadableImages
from driftgen.training.vector_subsets import VectorSubsets
from driftgen.training.view import View

__all__ = ["Training", "train"]

# RNG stream ids
ALPHA, NOISE, PREVIEW, WEIGHTS, VECTORS, CROPS, POOL = range(7)
MEASURED = 256  # samples of the averaged weights that are measured, at least 2 of each class


class Training:
    """Task that trains a class-conditional generator with the drifting loss.

    Attributes:
        name: of the recipe, for the card of the saved model.
    """

    def __init__(
        self,
        config: TrainConfig,
        distributed: Distributed,
        info: Callable[[str], None] = lambda text: None,
        *,
        name: str = "",
        parts: Parts = NO_PARTS,
        init: str | None = None,
    ) -> None:
        self.config, self.distributed, self.name = config, distributed, name
        device, batch = distributed.device, config.batch
        queue = config.queue.kind == "queue"
        self.data = place_data(open_data(config.data, parts.data), config.data, device, queue=queue)
        check_step(batch, self.data.shape, distributed)
        cached = config.cache_features if config.may_cache else False
        images = choose_images(cached, self.data, device, queue=queue)
        self.tokenizer = make_tokenizer(config.tokenizer, device)
        torch.manual_seed(derive_seed(config.seed, WEIGHTS))
        self.generator = build_generator(
            config.generator,
            self.data.shape,
            len(self.data.class_names),
            checkpoint_blocks=config.checkpoint_blocks,
            given=parts.generator,
        )
        if init is not None:
            info(load_initial_weights(self.generator, init, self.data.class_names))
        mesh = make_mesh(config, distributed)
        if mesh is None:
            self.generator.to(device)  # with a mesh, the loop moves it shard by shard
        self.phi = build_features(config, self.data.shape, self.tokenizer, device, mesh, parts.encoders)
        self.model: nn.Module = self.generator
        if config.compile:
            compile_parts(self.generator)
            compile_parts(self.phi)
            if mesh is None:
                to_channels_last(self.generator)
                to_channels_last(self.phi)
        if distributed.group is not None and mesh is None:
            self.model = DistributedDataParallel(self.model)
        self.part = distributed.shard(batch.classes, "batch.classes")
        self.samples_per_step = batch.classes * batch.generated
        loss = DriftingLoss(**config.loss.model_dump(), process_group=distributed.group)
        autocast = torch.bfloat16 if config.precision == "bfloat16" else None
        if autocast is not None and mesh is None and not parts.encoders:  # modules of the caller stay as is
            self.phi.cast_convolutions(autocast)
        choice = config.encoders_per_step, config.seed, POOL
        self.encoders = StepEncoders(config.encoders, self.phi.networks, *choice)
        self.cache = open_cache(cached, images, self.phi.features, device, autocast, info)
        samples = CachedRows(images) if images is not None and self.cache is not None else self.data
        ahead = device.type == "cuda" and self.cache is None and not is_on_gpu(self.data)
        sizes = StepSizes(batch.classes, batch.positives, batch.unconditional)
        self.source = open_source(samples, sizes, config.queue, config.seed, ahead=ahead)
        self.subsets = (
            None if config.vectors is None else VectorSubsets(self._count_vectors(), config.vectors)
        )
        self.crops = SharedCrops(config.crops.share, config.crops.scale) if config.crops.share else None
        self.step = DriftStep(
            self.model, self.encode, loss, generated=batch.generated, autocast=autocast,
            subsets=self.subsets, crops=self.crops,
        )  # fmt: skip
        self.micro: MicroBatchedStep | None = None
        self.compute: Callable[[StepInputs], StepOutput] = self.step
        micro = min(batch.micro, self.part.stop - self.part.start)
        if micro > 1:
            self.compute = self.micro = MicroBatchedStep(self.step, micro, batch.mode)
        elif can_capture(config, distributed):
            weights = self.generator.parameters()
            self.compute = GraphedStep(self.step, weights, info, lambda: self.encoders.used)
        encoders = zip(config.encoders, self.phi.networks, strict=True)
        untrained = [entry.name for entry, encoder in encoders if never_trained(encoder)]
        self.health = Health(config.loss.temperatures, untrained, config.init is not None, config.ema_warmup)
        self.unreadable = UnreadableImages(self.data, distributed)
        self.last: tuple[StepInputs, StepOutput] | None = None
        self.done = 0  # steps up to the last one computed
        self._ahead: tuple[int, StepInputs, RNGState] | None = None  # the step drawn ahead
        self.parts, self.info = parts, info
        self.evaluation: RunEvaluation | None = None

    def describe(self) -> dict[str, str]:
        """See :class:`~driftgen.training.task.Describes`."""
        return describe_training(self.config, self.data, self.generator, self.phi.networks)

    def draw(self, step: int) -> StepInputs:
        """Draw labels, real samples, alpha and noise; the same for any number of processes."""
        config, device = self.config, self.distributed.device
        real = self.source.draw(step, self.part)
        guidance = config.guidance
        alpha = sample_alpha(
            config.batch.classes,
            guidance.low,
            guidance.high,
            guidance.power,
            guidance.no_guidance,
            derive_generator(config.seed, step, ALPHA),
        )
        if config.batch.unconditional == 0:
            alpha = torch.ones_like(alpha)  # guidance needs unconditional negatives
        noise = []
        for position in range(config.batch.classes)[self.part]:
            # One seed per class on the device's own generator: noise is large, so it is drawn in place. A
            # user's network may draw on the CPU.
            _seed(device, derive_seed(config.seed, step, NOISE, position))
            noise.append(self.generator.sample_noise(config.batch.generated))  # type: ignore[operator]
        inputs = guided_inputs(
            tree_map(lambda *parts: _move(torch.cat(parts), device), *noise),
            *(_move(t, device) for t in (real.labels, alpha[self.part], real.positives, real.unconditional)),
            generated=config.batch.generated,
        )
        if self.crops is not None:
            squares = self.crops.draw(config.batch.classes, derive_generator(config.seed, step, CROPS))
            inputs = inputs._replace(squares=_move(squares[self.part], device))
        if self.subsets is None:
            return inputs
        vectors = self.subsets.draw(derive_generator(config.seed, step, VECTORS))
        return inputs._replace(vectors=_move(vectors.repeat(len(real.labels), 1), device))

    def encode(self, samples: Tensor) -> dict[str, Tensor]:
        """Return φ of samples, or of the real images in these rows of the cache."""
        if self.cache is not None and not samples.is_floating_point():
            return self.cache(samples)
        return self.phi.features(samples, only=self.encoders.used)

    @torch.no_grad()
    def _count_vectors(self) -> list[int]:
        """Return the number of vectors of each feature."""
        sample = torch.zeros(1, *self.source.shape, device=self.distributed.device)
        with torch.compiler.set_stance("force_eager"):
            return [value.shape[1] for value in self.phi.features(sample).values()]

    def compute_gradient(self, step: int) -> Tensor:
        """See :class:`~driftgen.training.task.Task`, here and below."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != step:
            inputs = self.draw(step)
        else:
            _, inputs, random = ahead
            random.restore(self.distributed.device)  # networks may draw, for example for dropout
        self.encoders.choose(step)
        output = self.compute(inputs)
        self.last, self.done = (inputs, output), step + 1
        return output.loss

    def draw_ahead(self, step: int) -> None:
        """See :class:`~driftgen.training.task.DrawsAhead`."""
        device = self.distributed.device
        before = RNGState.save(device)
        inputs = self.draw(step)
        self._ahead = step, inputs, RNGState.save(device)
        before.restore(device)

    def measure(self, averaged: nn.Module) -> dict[str, Any]:
        """Return metrics of the last step.

        ``spread`` and ``diversity`` describe the weights that the run saves; ``batch_spread``,
        ``batch_diversity`` and all others describe the trained weights.
        """
        assert self.last is not None
        inputs, output = self.last
        _, alpha = inputs.conditions
        row = measure(output.generated, output.positives, output.drift, output.scale, self.step.loss)
        for key in ("spread", "diversity"):
            if key in row:
                row[f"batch_{key}"] = row.pop(key)
        averages = self._measure_average(averaged)
        return {"alpha": alpha.mean().item(), **row, **averages, **self.unreadable.update()}

    @torch.no_grad()
    def _measure_average(self, averaged: nn.Module) -> dict[str, float]:
        """Return spread and diversity of averaged weights on a part of the last step's noise."""
        assert self.last is not None
        inputs, output = self.last
        known = len(next(iter(output.positives.values())))  # micro-batches may keep the last classes only
        classes = min(known, CLASSES)
        each = min(self.config.batch.generated, max(2, MEASURED // classes))
        chosen = slice(len(inputs.positives) - known, len(inputs.positives) - known + classes)

        def choose_noise(t: Tensor) -> Tensor:
            by_class: Tensor = t.unflatten(0, (len(inputs.positives), -1))
            return by_class[chosen, :each].flatten(0, 1)

        part = StepInputs(
            tree_map(choose_noise, inputs.noise),
            tree_map(lambda t: t[chosen], inputs.conditions),
            inputs.positives[chosen],
            vectors=None if inputs.vectors is None else inputs.vectors[chosen],
            squares=None if inputs.squares is None else inputs.squares[chosen],
        )
        step = copy.copy(self.step)
        step.generator, step.generated = averaged, each
        # The compiled encoder has other shapes: a compilation would take longer than the pass.
        with torch.compiler.set_stance("force_eager"):
            generated = step.generate(part, averaged)
        positives = {name: features[:classes] for name, features in output.positives.items()}
        return measure_spread(generated, positives, self.step.loss)

    def check_health(self, row: Mapping[str, Any]) -> list[str]:
        return self.health.update(row)

    def save_preview(self, averaged: nn.Module, path: Path) -> Path | None:
        """Save a sheet of samples, one row per class.

        The first preview of a run adds real images, the last one nearest training images.
        """
        pipe, classes, path = self.pipeline(averaged), self.source.num_classes, path.with_suffix(".png")
        samples = save_samples(pipe, classes, path, seed=derive_seed(self.config.seed, PREVIEW))
        if samples is None:
            return None
        if self.last is None:  # no thread loads data yet
            save_real(self.data, pipe, path.with_name(REAL))
        if self.done == self.config.optim.steps:
            self.source.wait()  # data must not be loaded by two threads at once
            save_nearest(samples, classes, self.data, path.with_name(NEAREST), self.info)
        return path

    def save_models(self, models: Mapping[str, nn.Module], folder: Path, step: int) -> None:
        """Save averages as ``model/`` and ``model-ema-DECAY/``, and trained weights as ``model-live/``."""
        for name, target, weights in model_folders(models):
            self._save_model(models[name], folder / target, step=step, **weights)

    def _save_model(self, model: nn.Module, target: Path, **source: Any) -> None:
        modes = [(module, module.training) for module in model.modules()]
        try:
            origin = {"data": data_origin(self.data, self.config.data), **_origin(self.config)}
            pipe = self.pipeline(model, recipe=self.name, **source, **origin)
            with atomic_folder(target) as scratch:
                pipe.save_pretrained(scratch)
        finally:  # a pipeline has its generator in eval mode
            for module, training in modes:
                module.training = training

    def evaluate(self, averaged: Mapping[str, nn.Module], folder: Path, step: int) -> dict[str, Any]:
        """Score each average; save the best one of the run so far as ``model-best/``."""
        shared = not self.config.fsdp  # sharded models are whole in the main process only
        if not averaged:
            return {}
        if self.evaluation is None:
            processes = self.distributed if shared else Distributed(0, 1, self.distributed.device, None)
            self.evaluation = RunEvaluation(self.config, self.parts.data, processes, folder, self.info)
        result = self.evaluation({decay: self.pipeline(model) for decay, model in averaged.items()})
        if self.distributed.is_main:
            name = result["metric"]
            scores = {decay: row[name] for decay, row in result["ema"].items()}
            best = min(scores, key=lambda decay: scores[decay])
            target = folder / f"{RUN_MODEL}-best"
            before = read_config(target).source.get(name) if (target / "config.json").is_file() else None
            if before is None or scores[best] < before:
                self._save_model(averaged[best], target, step=step, ema=best, **{name: scores[best]})
        return {"evaluation": result}

    def pipeline(self, model: nn.Module, **source: Any) -> DriftPipeline:
        """Return a pipeline that samples from an averaged model."""
        names = self.data.class_names
        return DriftPipeline(
            model,
            self.tokenizer,
            class_names=names if len(names) == self.source.num_classes else None,
            guidance=self.config.output.sample_guidance,
            source={**source, "guidance_range": self.config.guidance_range},
        )

    def memory_advice(self) -> str:
        return memory_advice(self.config)

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"source/{k}": v for k, v in self.source.state_dict().items()}
        return state | (self.micro.state_dict() if self.micro is not None else {})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        prefix = "source/"
        self.source.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        if self.micro is not None:
            self.micro.load_state_dict(state, self.distributed.device)


def train(
    config: TrainConfig,
    folder: Path,
    distributed: Distributed,
    view: View,
    *,
    name: str = "",
    override: bool = False,
    report: Callable[[Path], object] | None = None,
    parts: Parts = NO_PARTS,
) -> bool:
    """Train a generator in ``folder``, or resume its training; return True if the run is complete.

    The folder receives ``model/`` (the first average), ``model-ema-DECAY/`` for each further average,
    ``samples/``, ``metrics.jsonl`` and whatever ``report(folder)`` writes.
    """
    config = check_run(folder, config, override=override)
    resumes = bool(Checkpoints(folder / CHECKPOINTS).steps)
    init = None if resumes else config.init
    task = Training(config, distributed, view.info, name=name, parts=parts, init=init)
    for note in [*getattr(task.data, "notes", []), *getattr(task.source, "notes", [])]:
        view.info(note)
    header = {"task": "train", "temperatures": list(config.loss.temperatures), "recipe": name}
    header |= _origin(config)
    try:
        return run_task(folder, config, task, distributed, view, header, report)
    finally:
        task.data.close()


def _origin(config: TrainConfig) -> dict[str, str]:
    """Return the record of the initial weights, for the header of the metrics and the model card."""
    return {} if config.init is None else {"init": config.init}


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to the device without waiting for it, which takes pinned host memory."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _seed(device: torch.device, seed: int) -> None:
    """Seed the generators of the CPU and of one device.

    ``torch.manual_seed`` seeds every device and queues a call for each one that is not initialized: the
    queue would grow with every step.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
