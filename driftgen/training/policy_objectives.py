"""Training objectives of a policy: the drifting loss, and the baselines regression and diffusion."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.drift.loss import DriftingLoss
from driftgen.policy.chunk_samplers import TRAINING_STEPS, make_scheduler
from driftgen.support.distributed import Distributed
from driftgen.training.microbatch import MicroBatchedStep, reduce_gradients, take_rows
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.step import DriftStep, flatten_samples
from driftgen.training.step_inputs import Features, StepInputs, StepOutput
from driftgen.training.step_metrics import measure

__all__ = [
    "ChunkStep",
    "DiffusionObjective",
    "DriftingObjective",
    "JointStep",
    "Objective",
    "RegressionObjective",
]


class Objective(Protocol):
    """Adds the gradient of a step to ``.grad``.

    Attributes:
        generated: chunks per observation.
        compute: the step, a function of :class:`StepInputs`.
    """

    generated: int
    compute: Callable[[StepInputs], StepOutput]

    def inputs(
        self,
        noise: Tensor,
        observations: dict[str, Tensor],
        positives: Tensor,
        part: slice,
        random: torch.Generator,
    ) -> StepInputs:
        """Return the inputs of a step, with whatever else the objective draws from ``random``.

        Args:
            noise: of all processes, so that further draws do not depend on their number.
            observations: of this process.
            positives: of this process.
            part: noise chunks of this process.
            random: generator that the noise was drawn from.
        """
        ...

    def measure(self, output: StepOutput) -> dict[str, Any]:
        """Return metrics of a step."""
        ...


class ChunkStep(DriftStep):
    """A drifting step on raw chunks in float32, also if the network computes in bfloat16.

    bfloat16 resolves 1/256 of the range of an action: a pixel of PushT.
    """

    def _grouped_features(self, samples: Tensor, inputs: StepInputs) -> Features:
        features, groups = self.encode(samples.float()), len(inputs.positives)
        return {name: value.unflatten(0, (groups, -1)) for name, value in features.items()}


class JointStep(ChunkStep):
    """A drifting step with groups of several observations, in the joint space of observation and chunk.

    A sample is (o, f(ε, o)), a positive is (o', a'). The observation part has no gradient; it makes chunks of
    near observations attract and repel each other.

    Args:
        groups: number of groups of a step.
        weight: of the observation relative to the chunk; both have the same number of coordinates at 1.
        options: of :class:`~driftgen.training.step.DriftStep`.
    """

    def __init__(self, *args: Any, groups: int, weight: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.groups, self.weight = groups, weight

    def generate(self, inputs: StepInputs, generator: nn.Module) -> Features:
        return self._join(super().generate(inputs, generator), inputs)

    def encode_real(self, inputs: StepInputs) -> tuple[Features, Features]:
        positives, unconditional = super().encode_real(inputs)
        return self._join(positives, inputs), unconditional

    def _join(self, features: Mapping[str, Tensor], inputs: StepInputs) -> Features:
        """Append observations to features ``[C, n, 1, D]`` and merge groups of conditions."""
        (observations,) = inputs.conditions
        states = torch.cat([value.flatten(1) for value in observations.values()], dim=1)
        joined = {}
        for name, chunks in features.items():
            scale = self.weight * math.sqrt(chunks.shape[-1] / states.shape[1])
            rows = (states * scale).to(chunks.dtype)[:, None, None].expand(*chunks.shape[:3], -1)
            merged = torch.cat([chunks, rows], dim=-1).unflatten(0, (self.groups, -1))
            joined[name] = merged.flatten(1, 2)
        return joined


class DriftingObjective:
    """The drifting loss on raw action chunks, without a feature encoder (section "Robotic Control").

    Each observation is a group: its chunks are negatives of each other, its demonstrated chunk attracts.
    """

    def __init__(self, model: nn.Module, config: PolicyConfig, distributed: Distributed) -> None:
        loss = DriftingLoss(**config.loss.model_dump(), process_group=distributed.group)
        self.generated, self.loss = config.batch.generated, loss
        options: dict[str, Any] = {
            "generated": self.generated,
            "autocast": _autocast(config),
            "repeat": False,
        }
        if config.joint.groups:
            own = distributed.shard(config.joint.groups, "joint.groups")
            options |= {"groups": own.stop - own.start, "weight": config.joint.weight}
        kind = JointStep if config.joint.groups else ChunkStep
        self.step = kind(model, flatten_samples, loss, **options)
        self.micro = MicroBatchedStep(self.step, config.batch.micro) if config.batch.micro > 1 else None
        self.compute: Callable[[StepInputs], StepOutput] = self.micro or self.step

    def inputs(
        self,
        noise: Tensor,
        observations: dict[str, Tensor],
        positives: Tensor,
        part: slice,
        random: torch.Generator,
    ) -> StepInputs:
        """See :class:`Objective`."""
        return StepInputs(noise[part], (observations,), positives)

    def measure(self, output: StepOutput) -> dict[str, Any]:
        """Return drift, scale, spread and neighbors of the step.

        ``diversity`` is left out: several positives of one observation are chunks of its nearest neighbors,
        which say little about the spread of the right chunks. ``chunk_spread`` and ``energy_score`` do.
        """
        row = measure(output.generated, output.positives, output.drift, output.scale, self.loss)
        row.pop("diversity", None)
        return row


class RegressionObjective:
    """Mean squared error of f(0, o): predicts the mean chunk, between two ways if there are two."""

    def __init__(self, model: nn.Module, config: PolicyConfig, distributed: Distributed) -> None:
        self.generated, self.descend = 1, _SquaredError(model, config, distributed)
        self.compute: Callable[[StepInputs], StepOutput] = self._step

    def inputs(
        self,
        noise: Tensor,
        observations: dict[str, Tensor],
        positives: Tensor,
        part: slice,
        random: torch.Generator,
    ) -> StepInputs:
        """See :class:`Objective`."""
        return StepInputs(torch.zeros_like(noise[part]), (observations,), positives)

    def measure(self, output: StepOutput) -> dict[str, Any]:
        """Return nothing: the loss says it all."""
        return {}

    def _step(self, inputs: StepInputs) -> StepOutput:
        return self.descend(inputs, inputs.noise, inputs.positives[:, 0])


class DiffusionObjective:
    """DDPM: predicts the noise ε in √ᾱ a + √(1 − ᾱ) ε at a random time step, as Diffusion Policy does."""

    def __init__(self, model: nn.Module, config: PolicyConfig, distributed: Distributed) -> None:
        self.generated, self.descend = 1, _SquaredError(model, config, distributed)
        self.alphas: Tensor = make_scheduler("ddpm").alphas_cumprod.to(distributed.device)
        self.compute: Callable[[StepInputs], StepOutput] = self._step

    def inputs(
        self,
        noise: Tensor,
        observations: dict[str, Tensor],
        positives: Tensor,
        part: slice,
        random: torch.Generator,
    ) -> StepInputs:
        """See :class:`Objective`."""
        time = torch.randint(TRAINING_STEPS, (len(noise),), generator=random, device=random.device)
        return StepInputs(noise[part], (observations, time.to(noise.device)[part]), positives)

    def measure(self, output: StepOutput) -> dict[str, Any]:
        """Return nothing: the loss says it all."""
        return {}

    def _step(self, inputs: StepInputs) -> StepOutput:
        alpha = self.alphas[inputs.conditions[1]][:, None, None]
        noisy = alpha.sqrt() * inputs.positives[:, 0] + (1 - alpha).sqrt() * inputs.noise
        return self.descend(inputs, noisy, inputs.noise)


OBJECTIVES: dict[str, Callable[[nn.Module, PolicyConfig, Distributed], Objective]] = {
    "drifting": DriftingObjective,
    "regression": RegressionObjective,
    "diffusion": DiffusionObjective,
}


class _SquaredError:
    """Adds the gradient of the mean squared error of a network, one micro-batch after the other."""

    def __init__(self, model: nn.Module, config: PolicyConfig, distributed: Distributed) -> None:
        self.model, self.group, self.autocast = model, distributed.group, _autocast(config)
        self.micro = config.batch.micro

    def __call__(self, inputs: StepInputs, chunks: Tensor, target: Tensor) -> StepOutput:
        """Return the loss over all processes."""
        total, loss = len(target), torch.zeros((), device=target.device)
        edges = [round(i * total / self.micro) for i in range(self.micro + 1)]
        for start, stop in itertools.pairwise(edges):
            if start == stop:
                continue
            rows = slice(start, stop)
            with reduce_gradients(self.model, when=stop == total):
                with torch.autocast(target.device.type, self.autocast, enabled=self.autocast is not None):
                    predicted = self.model(chunks[rows], *take_rows(inputs.conditions, rows))
                part = F.mse_loss(predicted.float(), target[rows]) * ((stop - start) / total)
                part.backward()
            loss = loss + part.detach()
        if self.group is not None:
            dist.all_reduce(loss, group=self.group)
            loss = loss / dist.get_world_size(self.group)
        return StepOutput(loss, {}, {}, {}, {})


def _autocast(config: PolicyConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.precision == "bfloat16" else None
