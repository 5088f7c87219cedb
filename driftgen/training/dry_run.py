"""Cost of a run before it starts: time, memory and disk, from its first steps. Nothing is written."""

from __future__ import annotations

import copy
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.support.distributed import Distributed
from driftgen.support.peak_memory import peak_memory, reset_peak_memory, show_memory, total_memory
from driftgen.support.rng import RNGState
from driftgen.support.sizes import show_size
from driftgen.training.build import NO_PARTS, Parts
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import Output, TrainConfig
from driftgen.training.loop import Loop
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.policy_task import PolicyTraining
from driftgen.training.pretrain import Pretraining
from driftgen.training.recipes import RunConfig
from driftgen.training.run_folder import CHECKPOINTS, check_run, recorded_init
from driftgen.training.step_clock import show_duration, show_speed
from driftgen.training.summary import Summary
from driftgen.training.trainer import Training
from driftgen.training.view import View

__all__ = ["DryRun", "RunEstimate", "describe_estimate", "dry_run", "measure_run"]


@dataclass(frozen=True)
class RunEstimate:
    """Cost of a whole run.

    Attributes:
        steps: of the run.
        seconds_per_step: after the first step, with its share of metrics and previews.
        first_step_seconds: with compilation and CUDA graph capture; of all encoders, if they take turns.
        memory_bytes: peak, allocated on the GPU or resident in host memory; see
            :func:`driftgen.support.peak_memory.peak_memory`.
        checkpoint_bytes: of all checkpoints that are on disk at the same time.
        model_bytes: of all saved models.
        picture_bytes: of all sample sheets and metrics.
    """

    steps: int
    seconds_per_step: float
    first_step_seconds: float
    memory_bytes: int | None
    checkpoint_bytes: int
    model_bytes: int
    picture_bytes: int

    @property
    def disk_bytes(self) -> int:
        """Bytes of the run's folder at its largest."""
        return self.checkpoint_bytes + self.model_bytes + self.picture_bytes

    def seconds(self, done: int = 0) -> float:
        """Seconds from step ``done`` to the end."""
        left = self.steps - done
        return self.first_step_seconds + (left - 1) * self.seconds_per_step if left > 0 else 0.0


class DryRun(NamedTuple):
    """Rows about the cost of a run, and the seconds that are left of it."""

    rows: dict[str, str]
    seconds: float


def measure_run(
    config: RunConfig,
    distributed: Distributed | None = None,
    *,
    parts: Parts = NO_PARTS,
    steps: int = 2,
    view: View | None = None,
) -> RunEstimate:
    """Build everything a run needs, run its first steps, and return the cost of the whole run.

    The first step compiles and allocates, so the others give the seconds per step. No run folder is read or
    written, RNG states stay as they are, and a network passed from Python gets its weights back. Memory is
    freed at the end, so that several sizes can be measured one after the other.

    Args:
        config: of the run.
        distributed: the processes; started on the best device if None.
        parts: data and networks that were passed from Python.
        steps: number of steps to run, at least 2; of each encoder, if they take turns.
        view: shows messages of the run, such as the reason for a disabled CUDA graph.
    """
    if steps < 2:
        raise InputError(f"steps={steps} must be at least 2: the first step compiles and allocates")
    processes = distributed or Distributed.start()
    device = processes.device
    random = RNGState.save(device)
    reset_peak_memory(device)
    try:
        with _unchanged(parts.generator):
            return _measure(config, processes, parts, steps, view or _NoView())
    finally:
        random.restore(device)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def dry_run(
    config: RunConfig,
    folder: Path,
    *,
    view: View,
    device: str | None = None,
    override: bool = False,
    parts: Parts = NO_PARTS,
) -> DryRun:
    """Check and measure the run that would start in ``folder``, and return its cost.

    A run in the folder is read, and stays as it is.
    """
    processes = Distributed.start(device)
    try:
        if isinstance(config, TrainConfig):
            config = recorded_init(config, folder, view)
        config = check_run(folder, config, override=override)
        estimate = measure_run(config, processes, parts=parts, view=view)
        done = max(Checkpoints(folder / CHECKPOINTS).steps, default=0)
        rows = describe_estimate(estimate, folder, processes.device, done)
        return DryRun(rows, estimate.seconds(done))
    finally:
        processes.close()


def describe_estimate(
    estimate: RunEstimate, folder: Path, device: torch.device, done: int = 0
) -> dict[str, str]:
    """Return rows about the cost of a run in ``folder``, of which ``done`` steps are done."""
    memory, free = total_memory(device), _free_bytes(folder)
    peak = "" if estimate.memory_bytes is None else f"{show_memory(estimate.memory_bytes)} at the peak"
    whole = "" if memory is None else f"of {show_memory(memory)}"
    short = free is not None and estimate.disk_bytes > free
    left = f"for the {estimate.steps - done:,} steps after step {done:,}" if done else "in all"
    return {
        "time": f"{show_duration(estimate.seconds(done))} {left}: {show_speed(estimate.seconds_per_step)}, "
        f"{estimate.first_step_seconds:.1f} s for the first step",
        **({"memory": ", ".join(part for part in (peak, whole) if part)} if peak else {}),
        "disk": f"{show_size(estimate.disk_bytes)} at most: checkpoints "
        f"{show_size(estimate.checkpoint_bytes)}, models {show_size(estimate.model_bytes)}, samples and "
        f"metrics {show_size(estimate.picture_bytes)}"
        + ("" if free is None else f"; {'only ' if short else ''}{show_size(free)} free"),
        "dry run": f"only the first steps were run, nothing was written to {folder}",
    }


def _free_bytes(folder: Path) -> int | None:
    """Return the free space where the folder is, or would be."""
    existing = next((place for place in (folder, *folder.absolute().parents) if place.exists()), None)
    try:
        return None if existing is None else shutil.disk_usage(existing).free
    except OSError:
        return None


def _measure(config: RunConfig, processes: Distributed, parts: Parts, steps: int, view: View) -> RunEstimate:
    task: Training | Pretraining | PolicyTraining
    if isinstance(config, TrainConfig):
        task = Training(config, processes, view.info, parts=parts, init=config.init)
    elif isinstance(config, PolicyConfig):
        task = PolicyTraining(config, processes, view.info, parts=parts)
    else:
        task = Pretraining(config, processes, view.info, parts=parts)
    output, total = config.output, config.optim.steps
    # The first step of each encoder that takes turns compiles and allocates.
    turns = len(config.encoders) if isinstance(config, TrainConfig) and config.takes_turns else 1
    with tempfile.TemporaryDirectory(prefix="driftgen-") as name:
        try:
            loop = Loop(Path(name), config, task, processes, view)
            durations: list[float] = []
            if processes.is_main:
                view.begin(_about_parts(loop.summary()))
            try:
                for step in range(steps * turns):
                    with _timed(processes.device, durations):
                        loop.update(step)
                    view.advance(step + 1, None)
            except torch.OutOfMemoryError:
                raise InputError(
                    f"out of GPU memory in the first step: {task.memory_advice()}", topic="out-of-memory"
                ) from None
            measuring: list[float] = []
            with _timed(processes.device, measuring):
                row = task.measure(loop.ema.first)
            drawing: list[float] = []
            with _timed(processes.device, drawing):
                preview = loop.draw_preview(Path(name) / "preview")
            pictures = preview.stat().st_size if preview is not None else 0
            rounds = [sum(durations[i : i + turns]) for i in range(0, len(durations), turns)]
            return RunEstimate(
                steps=total,
                seconds_per_step=min(rounds[1:]) / turns
                + measuring[0] / output.metrics_every
                + drawing[0] / output.samples_every,
                first_step_seconds=rounds[0],
                memory_bytes=peak_memory(processes.device),
                checkpoint_bytes=kept_checkpoints(output, total) * _bytes(loop.state_tensors().values()),
                model_bytes=_saved_models(config) * _model_bytes(task),
                picture_bytes=-(-total // output.samples_every) * pictures
                + -(-total // output.metrics_every) * len(json.dumps(row)),
            )
        finally:
            if not isinstance(task, PolicyTraining):
                task.data.close()


def _about_parts(summary: Summary) -> Summary:
    """Return a summary without the rows that a dry run makes no use of."""
    unused = ("time", "output", "stop")
    return replace(summary, rows={k: v for k, v in summary.rows.items() if k not in unused}, resume="")


def kept_checkpoints(output: Output, steps: int) -> int:
    """Return the largest number of checkpoints that are on disk at the same time.

    An old checkpoint is deleted once a new one is complete.
    """
    saved = [*range(output.checkpoint_every, steps, output.checkpoint_every), steps]
    kept = set(saved[-output.keep_last - 1 :])
    if output.keep_every is not None:
        kept |= {step for step in saved if step % output.keep_every == 0}
    return len(kept)


def _saved_models(config: RunConfig) -> int:
    """Return the number of models in the folder of a run: averages, trained weights, best average."""
    return len(config.ema) + 1 + (config.output.eval_every is not None) if config.task != "pretrain" else 1


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _model_bytes(task: Training | Pretraining | PolicyTraining) -> int:
    """Return the size of one saved model, with its tokenizer."""
    if isinstance(task, PolicyTraining):
        return _bytes(task.network.state_dict().values())
    network = task.generator if isinstance(task, Training) else task.mae
    tokenizer = task.tokenizer if isinstance(task, Training) else None
    extra = tokenizer.state_dict().values() if isinstance(tokenizer, nn.Module) else ()
    return _bytes(network.state_dict().values()) + _bytes(extra)


@contextmanager
def _timed(device: torch.device, durations: list[float]) -> Iterator[None]:
    """Append the seconds of the block; kernels run behind the host, so both ends wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    durations.append(time.perf_counter() - started)


@contextmanager
def _unchanged(network: nn.Module | None) -> Iterator[None]:
    """Give a network its weights, buffers and training mode back after the block."""
    if network is None:
        yield
        return
    state, training = copy.deepcopy(network.state_dict()), network.training
    try:
        yield
    finally:
        network.load_state_dict(state)
        network.train(training)
        network.zero_grad()


class _NoView:
    """Shows nothing."""

    def begin(self, summary: object) -> None: ...
    def advance(self, step: int, seconds_per_step: float | None) -> None: ...
    def measured(self, speed: object) -> None: ...
    def update(self, row: object) -> None: ...
    def info(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
