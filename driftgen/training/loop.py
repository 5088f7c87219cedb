"""The loop of every kind of training: updates, averages, checkpoints, metrics, signals."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError, NotFiniteError
from driftgen.interop.run_models import LIVE
from driftgen.support.compile_times import record_compile_seconds
from driftgen.support.distributed import Distributed
from driftgen.support.folder_lock import hold_folder
from driftgen.support.peak_memory import peak_memory
from driftgen.support.provenance import command_line, environment
from driftgen.support.signals import handle_signals
from driftgen.training.checkpoint import Checkpoint, Checkpoints
from driftgen.training.ema import EMA, INITIAL_SHARE_LIMIT, unwrapped
from driftgen.training.optimizer import learning_rate
from driftgen.training.run_folder import CHECKPOINTS, SAMPLES, append_row, create_run
from driftgen.training.run_state import restore_tensors, state_tensors
from driftgen.training.sharding import gather_state, make_mesh, reshard, shard
from driftgen.training.step_clock import Speed, StepClock
from driftgen.training.stop_request import StoppedAfterLastStep, StopRequest
from driftgen.training.summary import Summary, summarize
from driftgen.training.task import LoopConfig, Task
from driftgen.training.trackers import Trackers
from driftgen.training.update import Update
from driftgen.training.view import View

__all__ = ["Loop", "run_task"]

MAX_BAD_STEPS = 3  # in a row
AGREE_EVERY = 10  # steps between collectives that ask whether any process received a signal


@dataclass
class Loop:
    """Runs the remaining steps of a run and saves checkpoints to resume from.

    Attributes:
        folder: of the run.
        config: of the run.
        task: the kind of training.
        distributed: the processes that train together.
        view: display of the run.
        report: called with the folder every ``output.report_every`` steps and at the end, or None.
        name: of the recipe, for the summary.
    """

    folder: Path
    config: LoopConfig
    task: Task
    distributed: Distributed
    view: View
    report: Callable[[Path], object] | None = None
    name: str = ""
    step: int = field(init=False, default=0)
    skipped: int = field(init=False, default=0)
    reported: bool = field(init=False, default=False)  # the first report comes with the first metrics

    def __post_init__(self) -> None:
        self.ema = EMA(self.task.model, self.config.ema, warmup=self.config.ema_warmup)
        self._shard()
        self.update = Update(self.task, self.config.optim, self.ema, sharded=self.sharded)
        output = self.config.output
        self.trackers: Trackers | None = None
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS, output.keep_last, output.keep_every)
        self.spent = 0.0  # seconds before the last resume
        self.clock = StepClock()
        self.request = StopRequest(self.view.info)

    def run(self) -> bool:
        """Run until the last step or a signal; return True if the run is complete."""
        try:
            with handle_signals(self.request.receive):
                return self._run()
        except torch.OutOfMemoryError:
            message = f"out of GPU memory after step {self.step}: {self.task.memory_advice()}"
            raise InputError(message, topic="out-of-memory") from None

    def _run(self) -> bool:
        self.trackers = Trackers(self.config, self.folder) if self.distributed.is_main else None
        self._resume()
        summary = self.summary()
        self._begin(summary)
        if self.step == 0:  # the initial weights; the time does not count in samples per second
            self._finish_or_stop(self._save_preview, "the first preview")
        self._started = self._last = time.monotonic()
        self._last_step, bad = self.step, 0
        while self.step < self.config.optim.steps and not self._should_stop():
            result = self._compute_step()
            if result is None:
                break
            good = result[0] is not None
            bad = 0 if good else bad + 1
            self.skipped += not good
            self.step += 1
            self._advance(summary)
            if bad == MAX_BAD_STEPS:
                self._save()
                message = (
                    f"{bad} steps in a row, up to step {self.step}, had a gradient that is not finite or "
                    "exploded: the state before them is saved; lower optim.lr, raise optim.warmup or set "
                    "precision=float32"
                )
                raise NotFiniteError(message, topic="skipped-steps")
            self._finish_or_stop(partial(self._follow_step, *result), f"the work after step {self.step}")
        complete = self.request.last_step_done = self.step >= self.config.optim.steps
        self._save()
        if self.trackers is not None:
            self.trackers.close()
        if self.distributed.is_main:
            self._report()
        self.distributed.barrier()
        if not complete:
            self.view.info(
                f"stopped by {self.request.signal} after step {self.step}; run the same command to resume: "
                f"{summary.resume}"
            )
        elif self.request.signal is not None:
            self.view.info(f"stopped by {self.request.signal} after the last step: {self.folder} is complete")
            raise StoppedAfterLastStep
        return complete

    def _follow_step(self, loss: float | None, norm: float) -> None:
        """Evaluate, record, draw and save what is due after a step."""
        output, last = self.config.output, self.step == self.config.optim.steps
        every = output.eval_every
        scores = self._evaluate() if every and (self.step % every == 0 or last) else {}
        if scores or (loss is not None and (self.step % output.metrics_every == 0 or last)):
            self._record(loss, norm, scores)
        if self.step % output.samples_every == 0 or last:
            self._save_preview()
        if self.step % output.checkpoint_every == 0 and not last:
            self._save()

    def _finish_or_stop(self, work: Callable[[], None], name: str) -> None:
        """Do work between two steps. If it fails because of a signal, the loop saves and stops."""
        try:
            work()
        except Exception as error:
            if self.distributed.world_size > 1 or not self.request.explains(error, name):
                raise

    def _compute_step(self) -> tuple[float | None, float] | None:
        """Return loss and gradient norm of a step; None if its gradient failed because of a signal."""
        try:
            gradient = self.update.compute_gradient(self.step)
        except Exception as error:
            # Weights are those before the step.
            if self.distributed.world_size > 1 or not self.request.explains(error, f"step {self.step + 1}"):
                raise
            return None
        return (None, math.nan) if gradient is None else self.update.apply(self.step, *gradient)

    def summary(self) -> Summary:
        """Return the summary of the run before its next step."""
        return summarize(
            self.folder,
            self.config,
            self.task,
            self.distributed,
            step=self.step,
            seconds_per_step=self.spent / self.step if self.step else None,
            name=self.name,
        )

    def _begin(self, summary: Summary) -> None:
        if self.step < self.config.optim.steps:
            self.view.begin(summary)
        else:
            self.view.advance(self.step, None)  # nothing is left to do
        self.clock.start()

    def _advance(self, summary: Summary) -> None:
        """Show that a step is done, and its speed once that is known."""
        known, each = self.clock.tick(), self.clock.seconds_per_step
        self.view.advance(self.step, each)
        first = self.clock.first_step_seconds
        if not known or each is None or first is None or not self.distributed.is_main:
            return
        if summary.compile_key is not None:
            record_compile_seconds(summary.compile_key, max(first - each, 0.0))
        left = each * (self.config.optim.steps - self.step)
        self.view.measured(Speed(each, left, first, peak_memory(self.distributed.device)))

    def _shard(self) -> None:
        """With ``fsdp``, shard the model and its averages over processes."""
        mesh = make_mesh(self.config, self.distributed)
        self.sharded = mesh is not None
        if mesh is None:
            if self.config.fsdp:
                self.view.info(
                    "fsdp is set, but there is one process, which holds everything: "
                    "use torchrun --nproc-per-node 8 -m driftgen ..."
                )
            return
        model = unwrapped(self.task.model)
        # Sharded modules cannot be deep-copied: the main process gathers whole models into this copy.
        self._copy = copy.deepcopy(model).requires_grad_(False).eval() if self.distributed.is_main else None
        for part in (model, *self.ema.models.values()):
            shard(part, mesh)

    def _gather(self, model: nn.Module) -> nn.Module:
        """Return an averaged model that the main process can use alone; a collective of all processes."""
        if not self.sharded:
            return model
        state = gather_state(model.state_dict(), keep=self.distributed.is_main)
        if self._copy is None:
            return model
        whole = copy.deepcopy(self._copy)
        whole.load_state_dict(state)
        return whole

    def draw_preview(self, path: Path) -> Path | None:
        """Draw the preview of the first average; return its file in the main process, if there is one."""
        model = self._gather(self.ema.first)
        if not self.distributed.is_main:
            return None
        return self.task.save_preview(model.to(self.distributed.device), path)

    def _save_preview(self) -> None:
        preview = self.draw_preview(self.folder / SAMPLES / f"step-{self.step:07d}")
        if self.trackers is not None and preview is not None:
            self.trackers.log_preview(preview, self.step)

    def _evaluate(self) -> dict[str, Any]:
        """Evaluate every average, in all processes. The time does not count in samples per second."""
        started = time.monotonic()
        models = {decay: self._gather(model) for decay, model in self.ema.models.items()}
        if self.sharded and not self.distributed.is_main:
            models = {}
        for model in models.values():
            model.to(self.distributed.device)
        scores = self.task.evaluate(models, self.folder, self.step)
        self.distributed.barrier()
        self._last += time.monotonic() - started
        return scores

    def _record(self, loss: float | None, norm: float, scores: Mapping[str, Any]) -> None:
        measured = self.task.measure(self.ema.first)  # a collective: every process takes part
        reshard(self.ema.first)
        if not self.distributed.is_main:
            return
        now = time.monotonic()
        rate = (self.step - self._last_step) * self.task.samples_per_step / max(now - self._last, 1e-9)
        self._last, self._last_step = now, self.step
        row = {
            "step": self.step,
            "seconds": round(self.spent + now - self._started, 3),
            "samples_per_second": rate,
            **({"memory_gib": peak / 2**30} if (peak := peak_memory(self.distributed.device)) else {}),
            "loss": loss,
            "learning_rate": learning_rate(self.config.optim, self.step - 1),
            "gradient_norm": norm,
            "skipped": self.skipped,
            **measured,
            **scores,
        }
        shares = {d: share for d, share in self.ema.initial_share.items() if share > INITIAL_SHARE_LIMIT}
        if shares:  # the share, and the step at which it reaches the limit
            row["ema_initial_share"] = {
                decay: [share, self.step + self.ema.updates_until(decay)] for decay, share in shares.items()
            }
        warnings = self.task.check_health(row)
        if warnings:
            row["warnings"] = warnings
        append_row(self.folder, row)
        self.view.update(row)
        if self.trackers is not None:
            self.trackers.update(row)
        due = self.step % self.config.output.report_every == 0 or not self.reported
        if due and self.step < self.config.optim.steps:  # the last report comes after the last checkpoint
            self._report()
        for warning in warnings:
            self.view.warn(warning)

    def _report(self) -> None:
        self.reported = True
        if self.report is not None:
            self.report(self.folder)

    def _should_stop(self) -> bool:
        if self.distributed.world_size == 1:
            return self.request.signal is not None
        if self.step % AGREE_EVERY:
            return False
        stop = self.distributed.any(self.request.signal is not None)
        self.request.signal = self.request.signal or ("another process" if stop else None)
        return stop

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint; those of a sharded model are sharded."""
        return state_tensors(self.task, self.ema, self.update, self.distributed.device)

    def _save(self) -> None:
        """Save a checkpoint and the models, so that a running or killed run can be resumed and sampled."""
        tensors = gather_state(self.state_tensors(), keep=self.distributed.is_main)
        if self.distributed.is_main:
            seconds = self.spent + time.monotonic() - self._started
            record = {
                "step": self.step,
                "skipped": self.skipped,
                "seconds": seconds,
                "norms": self.update.norms,
                "ema": self.ema.progress(),
                "config": self.config.model_dump(mode="json"),
            }
            self.checkpoints.save(self.step, tensors, record)
        del tensors
        models = {decay: self._gather(model) for decay, model in self.ema.models.items()}
        models[LIVE] = self._gather(unwrapped(self.task.model))
        if self.distributed.is_main:
            self.task.save_models(models, self.folder, self.step)
        self.distributed.barrier()

    def _resume(self) -> None:
        checkpoint = self.checkpoints.load()
        for line in self.checkpoints.damaged:
            self.view.info(line)
        if checkpoint is None:
            return
        try:
            self._restore(checkpoint)
        except (InputError, RuntimeError, LookupError, ValueError) as error:
            raise InputError(
                f"{checkpoint.path} does not fit this configuration: {str(error).splitlines()[0]}"
            ) from None
        done = self.step >= self.config.optim.steps
        longer = f"--set optim.steps={2 * self.step} --override"
        more = f": the run is complete; train longer with {longer}" if done else ""
        self.view.info(f"resumed after step {self.step}{more}")

    def _restore(self, checkpoint: Checkpoint) -> None:
        notes = restore_tensors(checkpoint, self.task, self.ema, self.update, self.distributed.device)
        for note in notes:
            self.view.info(note)
        self.step, self.skipped = checkpoint.step, int(checkpoint.record["skipped"])
        self.spent = float(checkpoint.record["seconds"])
        self.update.norms = list(checkpoint.record["norms"])
        self.ema.load_progress(checkpoint.record.get("ema"), updates=self.step - self.skipped)


def run_task(
    folder: Path,
    config: LoopConfig,
    task: Task,
    distributed: Distributed,
    view: View,
    header: Mapping[str, Any],
    report: Callable[[Path], object] | None = None,
) -> bool:
    """Run a task in a folder, or resume it; return True if the run is complete.

    ``header`` becomes the first line of ``metrics.jsonl``. The loop adds the weights that the previews, the
    saved model and the metrics of averaged weights belong to, the command and the environment.
    """
    with hold_folder(folder, distributed):
        if distributed.is_main:
            about = environment(distributed.device, distributed.world_size)
            weights = f"EMA {float(config.ema[0])}"
            create_run(folder, config, **header, weights=weights, command=command_line(), environment=about)
        distributed.barrier()
        return Loop(folder, config, task, distributed, view, report, str(header.get("recipe", ""))).run()
