"""The update of one step: gradient, clipping, optimizer and averages, with the next step drawn meanwhile."""

from __future__ import annotations

import math

from torch import Tensor, nn

from driftgen.errors import InputError, NotFiniteError
from driftgen.training.config import Optimizer
from driftgen.training.ema import EMA, unwrapped
from driftgen.training.optimizer import clip, learning_rate, make_optimizer
from driftgen.training.task import DrawsAhead, Task

__all__ = ["EXPLODED", "Update"]

EXPLODED = 1e6  # times the median gradient norm
MEDIAN_AFTER, MEDIAN_OF = 50, 100  # norms before the median is used, and norms that it is taken of


class Update:
    """Runs the updates of a task; the host reads the loss of a step last.

    Kernels run behind the host. All work of a step is queued before the host waits for its loss: gradient,
    clipping, optimizer and the inputs of the next step. The GPU therefore computes while the host draws. The
    optimizer is queued before the host knows whether the step is to be skipped, so its kernels decide by a
    flag on the GPU. The host makes the same decision from the same numbers.

    Args:
        task: adds the gradient of a step to ``.grad``.
        config: of the optimizer.
        ema: averages to update.
        sharded: the parameters are sharded by FSDP.

    Attributes:
        optimizer: AdamW or Muon over ``parameters``.
        parameters: trained parameters of the task's model.
        norms: last gradient norms of steps that were not skipped.
    """

    def __init__(self, task: Task, config: Optimizer, ema: EMA, *, sharded: bool = False) -> None:
        self.task, self.config, self.ema = task, config, ema
        if sharded and config.kind == "muon":
            raise InputError("optim.kind=muon needs whole matrices, which fsdp cuts: set fsdp=false")
        model = unwrapped(task.model)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
        self.optimizer = make_optimizer(self.parameters, config, embeddings=tables)
        self.decides_on_device = self.optimizer.defaults["fused"] is True and not sharded
        self.norms: list[float] = []

    def __call__(self, step: int) -> tuple[float | None, float]:
        """Run one step; return its loss and gradient norm. The loss of a skipped step is None.

        A step is skipped if its loss or gradient norm is not finite, or if the norm exploded.
        """
        gradient = self.compute_gradient(step)
        return (None, math.nan) if gradient is None else self.apply(step, *gradient)

    def compute_gradient(self, step: int) -> tuple[Tensor, Tensor] | None:
        """Queue the gradient of a step; return its loss and its norm before clipping, None to skip it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        self.optimizer.zero_grad()
        try:
            loss = self.task.compute_gradient(step)
        except NotFiniteError:
            return None
        return loss, clip(self.parameters, self.config.clip)

    def apply(self, step: int, loss: Tensor, norm: Tensor) -> tuple[float | None, float]:
        """Update weights and averages, and draw the inputs of the next step."""
        limit = self._limit()
        if self.decides_on_device:
            finite = norm.isfinite() & loss.to(norm.device).isfinite()
            # The fused AdamW, and Muon, leave weights and state as they are if this attribute is 1.
            self.optimizer.found_inf = (~(finite & (norm.double() <= limit))).float()  # type: ignore[attr-defined]
            self.optimizer.step()
        if isinstance(self.task, DrawsAhead) and step + 1 < self.config.steps:
            self.task.draw_ahead(step + 1)
        loss_value, norm_value = float(loss), float(norm)  # the host waits here
        if not math.isfinite(norm_value) or not math.isfinite(loss_value) or norm_value > limit:
            return None, norm_value
        self.norms = [*self.norms[1 - MEDIAN_OF :], norm_value]
        if not self.decides_on_device:
            self.optimizer.step()
        self.ema.update(self.task.model)
        return loss_value, norm_value

    def _limit(self) -> float:
        """Return the gradient norm above which a step is skipped."""
        if len(self.norms) < MEDIAN_AFTER:
            return math.inf
        return EXPLODED * sorted(self.norms)[len(self.norms) // 2]
