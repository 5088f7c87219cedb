"""The protocol between the training loop and the kinds of training that run in it.

The loop owns steps, updates, averages, checkpoints, metrics and signals. A task owns everything that
depends on the kind of sample: networks, inputs of a step, metrics, previews and the saved model. A task
that trains with the drifting loss draws :class:`~driftgen.training.step_inputs.StepInputs` and passes them
to a :class:`~driftgen.training.step.DriftStep`; ``tests/training/test_task.py`` has a complete one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from driftgen.training.config import Optimizer, Output

__all__ = ["Describes", "DrawsAhead", "LoopConfig", "Task"]


class Task(Protocol):
    """One kind of training.

    Randomness depends on the seed and the step alone (``driftgen.support.rng``), so that a resumed run draws
    the same numbers. ``averaged`` is the model of the first EMA decay, in eval mode: the weights that a run
    saves, samples from and reports.

    Attributes:
        model: the trained network; may be compiled or wrapped in DistributedDataParallel.
        samples_per_step: over all processes, for samples per second.
    """

    model: nn.Module
    samples_per_step: int

    def compute_gradient(self, step: int) -> Tensor:
        """Add the gradient of a step to ``.grad`` and return its loss, a scalar over all processes.

        Raises:
            NotFiniteError: skips the step.
        """
        ...

    def measure(self, averaged: nn.Module) -> dict[str, Any]:
        """Return metrics of the step just computed and of the averaged model, as JSON values.

        Called in every process, every ``output.metrics_every`` steps.
        """
        ...

    def check_health(self, row: Mapping[str, Any]) -> list[str]:
        """Return new warnings about a row of ``metrics.jsonl``, one line each."""
        ...

    def save_preview(self, averaged: nn.Module, path: Path) -> Path | None:
        """Write what the averaged model generates at present to ``path`` plus a suffix of the task's choice.

        Returns the file, or None if there is nothing to show. Called in the main process only, before the
        first step and every ``output.samples_every`` steps.
        """
        ...

    def save_models(self, models: Mapping[str, nn.Module], folder: Path, step: int) -> None:
        """Save the averaged model of each decay under ``folder``, and perhaps the trained one, ``live``.

        Called in the main process only, after every checkpoint. The first model is that of the first decay,
        the last one is ``live``. Write it with :func:`driftgen.support.atomic_write.atomic_folder`, so that
        a running or killed run has a model, and leave ``live`` in training mode.
        """
        ...

    def evaluate(self, averaged: Mapping[str, nn.Module], folder: Path, step: int) -> dict[str, Any]:
        """Evaluate the averaged model of each decay; return entries for the row of this step.

        Called in every process, every ``output.eval_every`` steps. With ``fsdp`` only the main process has
        whole models; the others call it with none, to take part in nothing but collectives of their own.
        """
        ...

    def memory_advice(self) -> str:
        """Return what to change after running out of GPU memory, such as ``use --set micro=2``."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that a checkpoint needs beside model, averages, optimizer and RNG."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the state of :meth:`state_dict`."""
        ...


@runtime_checkable
class DrawsAhead(Protocol):
    """A task that draws the inputs of the next step while the GPU computes the current one."""

    def draw_ahead(self, step: int) -> None:
        """Draw the inputs of a step, for the next call of ``compute_gradient``.

        Called after the gradient of the step before is queued, and before the host waits for it. RNG states
        must be those of a task that draws in ``compute_gradient``; :class:`driftgen.support.rng.RNGState`
        saves and restores them. A checkpoint may be written between the two calls.
        """
        ...


@runtime_checkable
class Describes(Protocol):
    """A task that describes its parts for the summary at the start of a run."""

    def describe(self) -> Mapping[str, str]:
        """Return a label and a line of text for each part: data, networks, batch."""
        ...


class LoopConfig(Protocol):
    """Settings that the loop reads: a pydantic model with a ``task`` name and at least these fields."""

    @property
    def task(self) -> str: ...
    @property
    def optim(self) -> Optimizer: ...
    @property
    def ema(self) -> tuple[float, ...]: ...
    @property
    def ema_warmup(self) -> bool: ...
    @property
    def output(self) -> Output: ...
    @property
    def fsdp(self) -> bool: ...
    def model_dump(self, *, mode: str = ..., exclude: Any = ...) -> dict[str, Any]: ...
