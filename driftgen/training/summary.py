"""The summary at the start of a run: data, networks, device, batch, steps, files, how to stop and resume."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from driftgen.data.config import Data
from driftgen.data.images import RealData
from driftgen.support.compile_times import last_compile_seconds
from driftgen.support.distributed import Distributed
from driftgen.support.peak_memory import show_memory, total_memory
from driftgen.support.provenance import count_threads
from driftgen.training.config import MODULE, PretrainConfig, TrainConfig
from driftgen.training.step_clock import show_duration, show_speed
from driftgen.training.task import Describes, LoopConfig, Task

__all__ = [
    "Summary",
    "data_origin",
    "describe_data",
    "describe_network",
    "describe_pretraining",
    "describe_training",
    "resume_command",
    "summarize",
]

NAMED = 3  # unreadable images that are named
FUNCTIONS = {"train": "train", "pretrain": "pretrain", "policy": "train"}  # of the tasks of the package


@dataclass(frozen=True)
class Summary:
    """Facts about a run before its next step.

    Attributes:
        rows: label and text of each fact.
        step: number of steps that are done.
        resume: the command that resumes the run.
        compile_key: identifies the compilation of the first step; None if nothing is compiled.
        samples_per_step: of all processes; None if not known.
    """

    rows: Mapping[str, str]
    step: int
    resume: str
    compile_key: str | None = None
    samples_per_step: int | None = None

    @property
    def first_step(self) -> str:
        """Name of the first step in the display: it may compile."""
        return "first step" if self.compile_key is None else "compiling"


def summarize(
    folder: Path,
    config: LoopConfig,
    task: Task,
    distributed: Distributed,
    *,
    step: int = 0,
    seconds_per_step: float | None = None,
    name: str = "",
) -> Summary:
    """Return the summary of a run that is about to begin, or to resume after ``step``.

    ``seconds_per_step`` is that before the resume. ``name`` is that of the recipe.
    """
    described = dict(task.describe()) if isinstance(task, Describes) else {}
    output, steps, device = config.output, config.optim.steps, _device(distributed)
    compiles = bool(getattr(config, "compile", False))
    key = f"{config.task}: {_networks(task)}; {device}; torch {torch.__version__}" if compiles else None
    files = "report.html, samples/, model/, " if config.task in FUNCTIONS else ""
    rows = described | {
        "device": f"{device}, {getattr(config, 'precision', 'float32')}{', compiled' if compiles else ''}",
        "steps": f"{steps:,}"
        + (f", {steps - step:,} left: resumes after step {step:,}" if step else "")
        + f"; checkpoint and model {_every(output.checkpoint_every, steps)}, "
        f"samples {_every(output.samples_every, steps)}",
        "time": "measured in the first steps, then printed with the peak memory"
        if seconds_per_step is None
        else f"about {show_duration(seconds_per_step * (steps - step))} left at "
        f"{show_speed(seconds_per_step)}, as before the stop",
        "output": f"{folder}: {files}checkpoints/, metrics.jsonl",
        "stop": "Ctrl-C, which saves a checkpoint and the model",
    }
    if key is not None:
        before = last_compile_seconds(key)
        rows["compiling"] = (
            "in the first step, often for a minute; the next run tells how long it took"
            if before is None
            else f"in the first step; it took {before:.0f} s last time"
        )
    return Summary(rows, step, resume_command(config.task, name, folder), key, task.samples_per_step)


def _every(interval: int, steps: int) -> str:
    return f"every {interval:,}" if interval < steps else "at the end"


def describe_training(
    config: TrainConfig, data: RealData, generator: nn.Module, encoders: Sequence[nn.Module]
) -> dict[str, str]:
    """Return rows for the data, the networks and the batch of ``driftgen train``."""
    rows, batch = describe_data(data, config.data), config.batch
    rows["generator"] = describe_network(generator) + (f", from {config.init}" if config.init else "")
    for i, (entry, encoder) in enumerate(zip(config.encoders, encoders, strict=True), 1):
        label = "encoder" if len(encoders) == 1 else f"encoder {i}"
        origin = "" if entry.name.lower() == type(encoder).__name__.lower() else f", {entry.name}"
        origin = ", passed from Python" if entry.name == MODULE else origin
        pool = f" and {len(entry.pool)} more, one a step" if entry.pool else ""
        rows[label] = describe_network(encoder) + origin + pool
    if config.takes_turns:
        rows["in turn"] = f"{config.encoders_per_step} of {len(encoders)} encoders a step"
    if not encoders:
        rows["encoder"] = "none: the loss compares the samples themselves"
    rows["batch"] = (
        f"{batch.classes} classes of {batch.generated} generated, {batch.positives} positive and "
        f"{batch.unconditional} unconditional samples{_micro(batch.micro)}"
    )
    return rows


def describe_pretraining(config: PretrainConfig, data: RealData, mae: nn.Module) -> dict[str, str]:
    """Return rows for the data, the network and the batch of ``driftgen pretrain``."""
    return describe_data(data, config.data) | {
        "encoder": f"{describe_network(mae)}, with the decoder",
        "batch": f"{config.batch_size} images{_micro(config.micro)}",
    }


def describe_data(data: RealData, config: Data) -> dict[str, str]:
    """Return rows for the samples of a run, and for images that could not be read."""
    counts = torch.bincount(data.labels.cpu(), minlength=len(data.class_names))
    smallest = int(counts.argmin())
    channels, height, width = data.shape
    text = f"{len(data.labels):,} {'gray' if channels == 1 else 'color'} images of {height}x{width} pixels"
    if config.kind == "latents":
        text = f"{len(data.labels):,} latents of {height}x{width}, {channels} channels"
    if len(counts) == 1:
        text += ", one class"
    else:
        text += f", {len(counts):,} classes; smallest: {data.class_names[smallest]} with {counts[smallest]:,}"
    rows = {"data": text + ("" if config.path is None else f"; from {config.path}")}
    unreadable = list(getattr(data, "unreadable", ()))
    if unreadable:
        more = f" and {len(unreadable) - NAMED:,} more" if len(unreadable) > NAMED else ""
        paths = (re.split(r" \(\w+: ", entry)[0] for entry in unreadable[:NAMED])  # without the reason
        rows["unreadable"] = f"{len(unreadable):,} left out: {', '.join(paths)}{more}"
    return rows


def data_origin(data: RealData, config: Data) -> str:
    """Return the data of a run for the card of its model, without folders of the machine."""
    name = config.kind if config.path is None else Path(config.path).name
    count = len(data.class_names)
    return f"{name}: {len(data.labels):,} samples, {count:,} {'class' if count == 1 else 'classes'}"


def describe_network(network: nn.Module) -> str:
    """Return the class of a network and its number of parameters."""
    count = sum(parameter.numel() for parameter in network.parameters())
    shown = f"{count / 1e6:,.1f}M" if count >= 1e5 else f"{count:,}"
    return f"{type(network).__name__}, {shown} parameters"


def resume_command(task: str, name: str, folder: Path) -> str:
    """Return what to type to resume the run: the command of this process, or the call from Python."""
    program = Path(sys.argv[0])
    if program.name in ("driftgen", "driftgen.exe"):
        words = ["driftgen"]
    elif program.parts[-2:] == ("driftgen", "__main__.py"):
        words = ["python", "-m", "driftgen"]
    elif task in FUNCTIONS:
        recipe = repr(name) if name else "..."
        return f"driftgen.{FUNCTIONS[task]}({recipe}, {str(folder)!r}, ...) with the same other arguments"
    else:
        return "run the same code again"
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by torchrun
        machines = os.environ.get("GROUP_WORLD_SIZE", "1")
        words = ["torchrun", "--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), "-m", "driftgen"]
        words[1:1] = ["--nnodes", machines] if machines != "1" else []
    return shlex.join([*words, *sys.argv[1:]])


def _micro(count: int) -> str:
    return f", in {count} micro-batches" if count > 1 else ""


def _networks(task: Any) -> str:
    phi = getattr(task, "phi", None)
    return " + ".join(map(describe_network, [task.model, *([] if phi is None else phi.networks)]))


def _device(distributed: Distributed) -> str:
    device = distributed.device
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}"
    else:
        name = f"{device.type}, {count_threads()}"
    memory = total_memory(device)
    name += "" if memory is None else f", {show_memory(memory)}"
    return name if distributed.world_size == 1 else f"{distributed.world_size} x {name}"
