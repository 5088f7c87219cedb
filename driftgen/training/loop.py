"""The loop that every kind of training runs in: updates, averages, checkpoints, metrics, signals."""

from __future__ import annotations

import copy
import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from driftgen.errors import InputError, NotFiniteError
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.training.checkpoint import Checkpoint, Checkpoints
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.distributed import Distributed
from driftgen.training.ema import EMA, unwrapped
from driftgen.training.optimizer import clip, learning_rate, make_optimizer
from driftgen.training.recipes import differences, load_recipe, to_yaml
from driftgen.training.sharding import gather_state, make_mesh, shard, shard_like
from driftgen.training.trackers import Trackers

__all__ = ["CHECKPOINTS", "CONFIG", "METRICS", "Loop", "Task", "View", "check_run", "create_run"]

CONFIG, METRICS, CHECKPOINTS = "config.yaml", "metrics.jsonl", "checkpoints"
BAD_IN_A_ROW = 3
EXPLODED = 1e6  # times the usual gradient norm
AGREE_EVERY = 10  # steps between looks at whether any process was told to stop


class View(Protocol):
    """Where a person watches a run."""

    def update(self, row: Mapping[str, Any]) -> None: ...

    def info(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Task(Protocol):
    """What differs from one kind of training to another."""

    model: nn.Module  # what is trained, perhaps wrapped

    def gradient(self, step: int) -> Tensor:
        """Fills ``.grad`` with the gradient of a step and returns its loss."""
        ...

    def measure(self) -> dict[str, Any]:
        """Further figures of the step just computed, for metrics.jsonl."""
        ...

    def save_samples(self, model: nn.Module, path: Path) -> None:
        """Draws what the averaged model does at present."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """What else must be the same after a resume."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None: ...

    def samples_per_step(self) -> int: ...


def check_run(folder: Path, config: TrainConfig | PretrainConfig, *, override: bool) -> None:
    """Whether the folder is free, or holds a run of the same configuration."""
    path = folder / CONFIG
    if path.is_file():
        old = load_recipe(str(path))
        changed = differences(old, config)
        if changed and not override:
            raise InputError(
                f"{folder} holds a run of another configuration ({'; '.join(changed[:5])}): "
                "give another --out, or --override to go on with the new values"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty and holds no run: give another --out")


def create_run(folder: Path, config: TrainConfig | PretrainConfig, **header: Any) -> None:
    """Makes the folder of a run; only once all its parts are known to fit together."""
    make_folder(folder)
    with atomic_write(folder / CONFIG) as scratch:
        scratch.write_text(to_yaml(config), encoding="utf-8")
    if not (folder / METRICS).exists():
        (folder / METRICS).write_text(json.dumps({"header": header}) + "\n", encoding="utf-8")


@dataclass
class Loop:
    """Runs the steps that are left, and never loses those that were made.

    Attributes:
        folder: of the run.
        config: of the run.
        task: what is trained.
        processes: who takes part.
        view: where it is shown.
        finish: called in the first process with the averaged model of each decay when all steps are done, and
            whenever the run is left.
        report: called in the first process with the folder, to draw the report of the run so far, now and
            then and after ``finish``; None draws none.
        watch: called with each row of metrics; returns warnings in plain words.
    """

    folder: Path
    config: TrainConfig | PretrainConfig
    task: Task
    processes: Distributed
    view: View
    finish: Callable[[Mapping[str, nn.Module], int], None]
    report: Callable[[Path], object] | None = None
    watch: Callable[[Mapping[str, Any]], list[str]] = lambda row: []
    step: int = field(init=False, default=0)
    skipped: int = field(init=False, default=0)
    stopping: str | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.averages = EMA(self.task.model, self.config.ema)
        self._shard()
        self.parameters = [p for p in unwrapped(self.task.model).parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.parameters, self.config.optim)
        output = self.config.output
        self.trackers = Trackers(self.config, self.folder) if self.processes.is_main else None
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, output.keep_last, output.keep_every)
        self.spent = 0.0  # seconds of the run before this process
        self.norms: list[float] = []

    def run(self) -> bool:
        """Whether the run is complete; False when it was told to stop before."""
        try:
            return self._run()
        except torch.OutOfMemoryError:
            raise InputError(f"out of GPU memory after step {self.step}: {_advice(self.config)}") from None

    def _run(self) -> bool:
        self._resume()
        config, processes = self.config, self.processes
        self._started = self._last = time.monotonic()
        self._last_step = self.step
        bad = 0
        with _signals(self._stop):
            while self.step < config.optim.steps and not self._told_to_stop():
                loss, norm = self._update()
                good = loss is not None
                bad = 0 if good else bad + 1
                self.skipped += not good
                self.step += 1
                if bad == BAD_IN_A_ROW:
                    self._save()
                    raise InputError(
                        f"{bad} steps in a row, up to step {self.step}, had a gradient that is not finite or "
                        "exploded: the state before them is saved; try a smaller optim.lr, a longer "
                        "optim.warmup, or float32"
                    )
                last = self.step == config.optim.steps
                if good and (self.step % config.output.metrics_every == 0 or last):
                    self._record(loss, norm)
                if self.step % config.output.samples_every == 0 or last:
                    self._save_samples()
                if self.step % config.output.checkpoint_every == 0 and not last:
                    self._save()
        self._save()
        if self.trackers is not None:
            self.trackers.close()
        complete = self.step >= config.optim.steps
        models = {decay: self._whole(model) for decay, model in self.averages.models.items()}
        if processes.is_main:
            self.finish(models, self.step)
            self._report()
        processes.barrier()
        if not complete:
            self.view.info(
                f"stopped by {self.stopping} after step {self.step}; the same command goes on from there"
            )
        return complete

    def _shard(self) -> None:
        """With ``fsdp``, leaves this process its share of the model and of its averages."""
        mesh = make_mesh(self.config, self.processes)
        self.sharded = mesh is not None
        if mesh is None:
            if self.config.fsdp:
                self.view.info(
                    "fsdp is set, but one process alone holds everything: "
                    "start several with torchrun --nproc-per-node N -m driftgen ..."
                )
            return
        model = unwrapped(self.task.model)
        # Shares cannot be copied: the first process keeps a copy in main memory to put whole models into.
        self._copy = copy.deepcopy(model).requires_grad_(False).eval() if self.processes.is_main else None
        for part in (model, *self.averages.models.values()):
            shard(part, mesh)

    def _whole(self, model: nn.Module) -> nn.Module:
        """An averaged model that the first process can use alone; all processes take part."""
        if not self.sharded:
            return model
        state = gather_state(model.state_dict(), keep=self.processes.is_main)
        if self._copy is None:
            return model
        whole = copy.deepcopy(self._copy)
        whole.load_state_dict(state)
        return whole

    def _save_samples(self) -> None:
        model = self._whole(self.averages.first)
        if self.processes.is_main:
            path = self.folder / "samples" / f"step-{self.step:07d}.png"
            self.task.save_samples(model.to(self.processes.device), path)
            if self.trackers is not None:
                self.trackers.save_samples(path, self.step)

    def _update(self) -> tuple[float | None, float]:
        """One step: its loss and gradient norm; None for a step that was skipped."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, self.step)
        self.optimizer.zero_grad()
        try:
            loss = float(self.task.gradient(self.step))
        except NotFiniteError:
            return None, math.nan
        norm = float(clip(self.parameters, self.config.optim.clip))
        usual = sorted(self.norms)[len(self.norms) // 2] if len(self.norms) >= 50 else math.inf
        if not math.isfinite(norm) or not math.isfinite(loss) or norm > EXPLODED * usual:
            return None, norm
        self.norms = [*self.norms[-99:], norm]
        self.optimizer.step()
        self.averages.update(self.task.model)
        return loss, norm

    def _record(self, loss: float | None, norm: float) -> None:
        measured = self.task.measure()  # all processes: some figures are shared
        if not self.processes.is_main:
            return
        now = time.monotonic()
        rate = (self.step - self._last_step) * self.task.samples_per_step() / max(now - self._last, 1e-9)
        self._last, self._last_step = now, self.step
        row = {
            "step": self.step,
            "seconds": round(self.spent + now - self._started, 3),
            "samples_per_second": rate,
            "memory_gib": _memory(self.processes.device),
            "loss": loss,
            "learning_rate": learning_rate(self.config.optim, self.step - 1),
            "gradient_norm": norm,
            "skipped": self.skipped,
            **measured,
        }
        warnings = self.watch(row)
        if warnings:
            row["warnings"] = warnings
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.view.update(row)
        if self.trackers is not None:
            self.trackers.update(row)
        if self.step % self.config.output.report_every == 0:
            self._report()
        for warning in warnings:
            self.view.warn(warning)

    def _report(self) -> None:
        if self.report is not None:
            self.report(self.folder)

    def _told_to_stop(self) -> bool:
        if self.processes.world_size == 1:
            return self.stopping is not None
        if self.step % AGREE_EVERY:
            return False
        stop = self.processes.any(self.stopping is not None)
        self.stopping = self.stopping or ("another process" if stop else None)
        return stop

    def _stop(self, name: str) -> None:
        if self.stopping is not None:  # asked twice: at once
            raise KeyboardInterrupt
        self.stopping = name

    def _save(self) -> None:
        tensors: dict[str, Tensor] = {}
        tensors |= {f"model/{k}": v for k, v in _plain_state(self.task.model).items()}
        tensors |= {f"ema/{k}": v for k, v in self.averages.state_dict().items()}
        tensors |= {f"task/{k}": v for k, v in self.task.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{k}": torch.as_tensor(v) for k, v in state.items()}
        tensors["random/cpu"] = torch.get_rng_state()
        if self.processes.device.type == "cuda":
            tensors["random/cuda"] = torch.cuda.get_rng_state(self.processes.device)
        tensors = gather_state(tensors, keep=self.processes.is_main)
        if self.processes.is_main:
            seconds = self.spent + time.monotonic() - self._started
            record = {
                "step": self.step,
                "skipped": self.skipped,
                "seconds": seconds,
                "norms": self.norms,
                "config": self.config.model_dump(mode="json"),
            }
            self.checkpoints.save(self.step, tensors, record)
        self.processes.barrier()

    def _resume(self) -> None:
        found = self.checkpoints.load()
        for line in self.checkpoints.damaged:
            self.view.info(line)
        if found is None:
            return
        try:
            self._restore(found)
        except (InputError, RuntimeError, LookupError, ValueError) as error:
            raise InputError(
                f"{found.path} does not fit this configuration: {str(error).splitlines()[0]}"
            ) from None
        self.view.info(f"resumed after step {self.step}")

    def _restore(self, found: Checkpoint) -> None:
        parts: dict[str, dict[str, Tensor]] = {
            "model": {},
            "ema": {},
            "task": {},
            "optimizer": {},
            "random": {},
        }
        for name, tensor in found.tensors.items():
            part, rest = name.split("/", 1)
            parts[part][rest] = tensor
        for part, holder in (("model", unwrapped(self.task.model)), ("ema", self.averages)):
            own = holder.state_dict()
            holder.load_state_dict({k: shard_like(v, own.get(k)) for k, v in parts[part].items()})
        self.task.load_state_dict(parts["task"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimizer"].items():
            index, key = name.split("/", 1)
            parameter = None if key == "step" else self.parameters[int(index)]
            # A copy: the file's own pages are not to be written to by every update.
            state.setdefault(int(index), {})[key] = shard_like(tensor.clone(), parameter)
        known = self.optimizer.state_dict()
        self.optimizer.load_state_dict({"state": state, "param_groups": known["param_groups"]})
        torch.set_rng_state(parts["random"]["cpu"].clone())
        if self.processes.device.type == "cuda" and "cuda" in parts["random"]:
            torch.cuda.set_rng_state(parts["random"]["cuda"].clone(), self.processes.device)
        self.step, self.skipped = found.step, int(found.record["skipped"])
        self.spent, self.norms = float(found.record["seconds"]), list(found.record["norms"])


def _advice(config: TrainConfig | PretrainConfig) -> str:
    """What makes a step need less memory."""
    if isinstance(config, PretrainConfig):
        return f"give --set micro={2 * config.micro}, the same step in parts"
    batch, ways = config.batch, []
    if 2 * batch.micro <= batch.classes:
        ways.append(f"batch.micro={2 * batch.micro} (the same step in parts)")
    if batch.micro > 1 and batch.mode == "exact":
        ways.append("batch.mode=previous")
    if config.generator.kind != "mlp" and not config.checkpoint_blocks:
        ways.append("checkpoint_blocks=true")
    return f"give --set {' or '.join(ways or ['batch.generated=N with fewer samples'])}"


def _plain_state(model: nn.Module) -> dict[str, Tensor]:
    return dict(unwrapped(model).state_dict())


def _memory(device: torch.device) -> float:
    """Most memory used so far, in GiB: of the GPU, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


@contextmanager
def _signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the loop to save and leave."""

    def handle(number: int, frame: Any) -> None:
        stop({signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}[signal.Signals(number)])

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
