"""``driftgen train``: a one-step generator from real samples (appendix "Training Loop")."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from driftgen.data.class_batches import StepSizes, open_source
from driftgen.drift.guidance import sample_alpha
from driftgen.drift.loss import DriftingLoss, LossOutput, Statistics
from driftgen.errors import InputError
from driftgen.generators.base import Noise
from driftgen.model_io import RUN_MODEL
from driftgen.ops.compile import compile_parts, to_channels_last
from driftgen.pipeline import DriftPipeline
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.images import contact_sheet, to_pil, to_uint8
from driftgen.support.rng import derive_generator, derive_seed
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
from driftgen.training.distributed import Distributed
from driftgen.training.graphed_step import GraphedStep, can_capture
from driftgen.training.health import Health, never_trained
from driftgen.training.loop import CHECKPOINTS, Loop, View, check_run, create_run
from driftgen.training.sharding import make_mesh
from driftgen.training.step import DriftStep, StepInputs, StepOutput
from driftgen.training.step_metrics import measure

__all__ = ["Training", "train"]

# Which randomness of a step it is.
ALPHA, NOISE, PICTURE, WEIGHTS = range(4)
SHOWN_CLASSES, SHOWN_EACH = 10, 10


class Training:
    """The task of the loop: draws a step, computes its gradient, measures its health."""

    def __init__(
        self,
        config: TrainConfig,
        processes: Distributed,
        info: Callable[[str], None] = lambda text: None,
        parts: Parts = NO_PARTS,
        init: str | None = None,
    ) -> None:
        self.config, self.processes = config, processes
        device = processes.device
        self.data = open_data(config.data, parts.data)
        batch = config.batch
        sizes = StepSizes(batch.classes, batch.positives, batch.unconditional)
        self.source = open_source(self.data, sizes, config.queue, config.seed, ahead=device.type == "cuda")
        self.tokenizer = make_tokenizer(config.tokenizer, device)
        classes = self.source.num_classes
        torch.manual_seed(derive_seed(config.seed, WEIGHTS))
        self.generator = build_generator(
            config.generator,
            self.source.shape,
            classes,
            checkpoint_blocks=config.checkpoint_blocks,
            given=parts.generator,
        )
        if init is not None:
            info(load_initial_weights(self.generator, init, self.data.class_names))
        mesh = make_mesh(config, processes)
        if mesh is None:
            self.generator.to(device)  # else the loop moves it, share by share
        phi = build_features(config, self.source.shape, self.tokenizer, device, mesh, parts.encoders)
        self.model: nn.Module = self.generator
        if config.compile:
            compile_parts(self.generator)
            compile_parts(phi)
            if mesh is None:
                to_channels_last(self.generator)
                to_channels_last(phi)
        if processes.group is not None and mesh is None:
            self.model = DistributedDataParallel(self.model)
        self.part = processes.shard(config.batch.classes, "batch.classes")
        loss = DriftingLoss(**config.loss.model_dump(), process_group=processes.group)
        self.step = DriftStep(
            self.model,
            phi,
            loss,
            generated=config.batch.generated,
            micro=min(config.batch.micro, self.part.stop - self.part.start),
            mode=config.batch.mode,
            autocast=torch.bfloat16 if config.precision == "bfloat16" else None,
        )
        self.compute: Callable[[StepInputs], StepOutput] = self.step
        if can_capture(config, processes):
            self.compute = GraphedStep(self.step, self.generator.parameters(), info)
        self.found: tuple[StepInputs, StepOutput] | None = None

    def samples_per_step(self) -> int:
        return self.config.batch.classes * self.config.batch.generated

    def draw(self, step: int) -> StepInputs:
        """All that is random in a step; the same whatever the processes it is shared by."""
        config, device = self.config, self.processes.device
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
            alpha = torch.ones_like(alpha)  # nothing to guide away from
        noise = []
        for position in range(config.batch.classes)[self.part]:
            # Drawn where it is needed, by the device's own generator: many numbers.
            _seed(device, derive_seed(config.seed, step, NOISE, position))
            noise.append(self.generator.sample_noise(config.batch.generated))  # type: ignore[operator]
        return StepInputs(
            real.labels.to(device, non_blocking=True),
            alpha[self.part].to(device, non_blocking=True),
            Noise(*(torch.cat(parts) for parts in zip(*noise, strict=True))),
            real.positives.to(device, non_blocking=True),
            real.unconditional.to(device, non_blocking=True),
        )

    def gradient(self, step: int) -> Tensor:
        drawn = self.draw(step)
        output = self.compute(drawn)
        self.found = drawn, output
        return output.loss

    def measure(self) -> dict[str, Any]:
        assert self.found is not None
        drawn, output = self.found
        empty = output.loss.new_empty(0)
        found = LossOutput(output.loss, empty, output.drift, output.scale)
        return {
            "alpha": drawn.alpha.mean().item(),
            **measure(output.generated, output.positives, found, self.step.loss),
        }

    def save_samples(self, model: nn.Module, path: Path) -> None:
        pipe = self.pipeline(model)
        classes = min(SHOWN_CLASSES, self.source.num_classes)
        each = SHOWN_EACH if classes > 1 else SHOWN_CLASSES * SHOWN_EACH
        try:
            images = pipe(
                [label for label in range(classes) for _ in range(each)],
                guidance=self.config.output.sample_guidance,
                seed=derive_seed(self.config.seed, PICTURE),
                output="tensor",
            )
            pictures = to_pil(to_uint8(images))
        except InputError:
            return  # samples that cannot be shown, such as latents without their tokenizer
        make_folder(path.parent)
        with atomic_write(path) as scratch:
            contact_sheet(pictures, columns=SHOWN_EACH).save(scratch)

    def pipeline(self, model: nn.Module, **source: Any) -> DriftPipeline:
        """The averaged model, ready to sample."""
        names = self.data.class_names
        return DriftPipeline(
            model,
            self.tokenizer,
            class_names=names if len(names) == self.source.num_classes else None,
            guidance=self.config.output.sample_guidance,
            source=source,
        )

    def state_dict(self) -> dict[str, Tensor]:
        state = {f"source/{k}": v for k, v in self.source.state_dict().items()}
        if self.step.previous is not None:
            state |= {"scale": self.step.previous.scale, "drift": self.step.previous.drift}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        prefix = "source/"
        self.source.load_state_dict(
            {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        )
        if "scale" in state:
            device = self.processes.device
            scale, drift = (state[k].clone().to(device) for k in ("scale", "drift"))
            self.step.previous = Statistics(scale, drift, self.config.batch.classes)


def train(
    config: TrainConfig,
    folder: Path,
    processes: Distributed,
    view: View,
    *,
    name: str = "",
    override: bool = False,
    report: Callable[[Path], object] | None = None,
    parts: Parts = NO_PARTS,
) -> bool:
    """Trains, or goes on with, the run in ``folder``; whether it is complete.

    The folder ends with ``model/`` (the first average, and one folder for each further one), ``samples/``,
    ``metrics.jsonl``, and what ``report(folder)`` writes, now and then and at the end.
    """
    check_run(folder, config, override=override)
    resumes = bool(Checkpoints(folder / CHECKPOINTS).steps)
    task = Training(config, processes, view.info, parts, None if resumes else config.init)
    encoders = zip(config.encoders, task.step.phi.networks, strict=True)
    untrained = [entry.name for entry, encoder in encoders if never_trained(encoder)]
    health = Health(config.loss.temperatures, untrained)
    for note in getattr(task.source, "notes", []):
        view.info(note)

    origin = {} if config.init is None else {"init": config.init}

    def finish(averages: Mapping[str, nn.Module], step: int) -> None:
        for i, (decay, model) in enumerate(averages.items()):
            place = folder / (RUN_MODEL if i == 0 else f"{RUN_MODEL}-ema-{decay}")
            task.pipeline(model, recipe=name, step=step, ema=decay, **origin).save_pretrained(place)

    if processes.is_main:
        temperatures = list(config.loss.temperatures)
        create_run(folder, config, task="train", temperatures=temperatures, recipe=name, **origin)
    processes.barrier()
    try:
        return Loop(folder, config, task, processes, view, finish, report, health.update).run()
    finally:
        task.data.close()


def _seed(device: torch.device, seed: int) -> None:
    """Seeds the generator of one device. ``torch.manual_seed`` seeds all, and keeps a note for each device
    that is not in use yet: many a step, and never let go.
    """
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
