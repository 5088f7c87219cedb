"""One training step (appendix "Training Loop"): the task draws its inputs, the loop applies the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from driftgen.drift.loss import DriftingLoss, LossOutput, Statistics
from driftgen.training.shared_crops import SharedCrops
from driftgen.training.step_inputs import Features, StepInputs, StepOutput, guided_inputs
from driftgen.training.vector_subsets import VectorSubsets

__all__ = ["DriftStep", "Features", "StepInputs", "StepOutput", "flatten_samples", "guided_inputs"]


def flatten_samples(samples: Tensor) -> Features:
    """Encode samples as themselves: one feature ``global``, ``[B, 1, D]``."""
    return {"global": samples.flatten(1)[:, None]}


class DriftStep:
    """Adds the gradient of the drifting loss to ``.grad`` of the generator's parameters.

    Args:
        generator: f, called as ``generator(noise, *conditions)``; may be wrapped in DDP or sharded by FSDP.
        encode: φ, maps samples ``[B, ...]`` to features ``[B, V, D]``; :func:`flatten_samples` for none.
        loss: holds the process group, if any.
        generated: N, generated samples per condition.
        autocast: dtype of the networks; None for float32.
        subsets: chooses the vectors that the loss compares; None for all.
        crops: crops samples before φ; None for whole samples.
        repeat: repeat each condition N times. False for a generator that does so itself, after it has
            encoded the conditions.
    """

    def __init__(
        self, generator: nn.Module, encode: Callable[[Tensor], Mapping[str, Tensor]], loss: DriftingLoss, *,
        generated: int, autocast: torch.dtype | None = None, subsets: VectorSubsets | None = None,
        crops: SharedCrops | None = None, repeat: bool = True,
    ) -> None:  # fmt: skip
        self.generator, self.encode, self.loss, self.repeat = generator, encode, loss, repeat
        self.generated, self.autocast, self.subsets, self.crops = generated, autocast, subsets, crops
        group = loss.settings.process_group
        self.world_size = 1 if group is None else dist.get_world_size(group)

    def __call__(self, inputs: StepInputs) -> StepOutput:
        """Compute the gradient of one step; the caller clears ``.grad`` first."""
        generated = self.generate(inputs, self.generator)  # φ(f(noise, conditions))
        positives, unconditional = self.encode_real(inputs)  # φ of real samples, without gradient
        out = self.compare(inputs, generated, positives, unconditional)  # scale, drift, loss
        (out.loss * self.world_size).backward()  # DDP and FSDP average gradients; the loss needs their sum
        return StepOutput.from_loss(out, generated, positives)

    def generate(self, inputs: StepInputs, generator: nn.Module) -> Features:
        """Generate N samples per condition and return their features ``[C, N, V, D]``."""
        args = inputs.conditions
        if self.repeat:
            args = tree_map_only(Tensor, lambda t: t.repeat_interleave(self.generated, 0), args)
        with torch.autocast(inputs.positives.device.type, self.autocast, enabled=self.autocast is not None):
            return self._grouped_features(generator(inputs.noise, *args), inputs)

    @torch.no_grad()
    def encode_real(self, inputs: StepInputs) -> tuple[Features, Features]:
        """Return the features of positives ``[C, P, V, D]`` and of unconditional samples (empty for none)."""
        p = inputs.positives.shape[1]
        both = [t for t in (inputs.positives, inputs.unconditional) if t is not None]
        with torch.autocast(inputs.positives.device.type, self.autocast, enabled=self.autocast is not None):
            features = self._grouped_features(torch.cat(both, dim=1).flatten(0, 1), inputs)
        negatives = {} if inputs.unconditional is None else {k: v[:, p:] for k, v in features.items()}
        return {k: v[:, :p] for k, v in features.items()}, negatives

    def compare(
        self, inputs: StepInputs, generated: Features, positives: Features, unconditional: Features,
        statistics: Statistics | None = None,
    ) -> LossOutput:  # fmt: skip
        """Return the drifting loss of the features; ``statistics`` replace those of this batch."""
        options = {"negative_weight": inputs.unconditional_weight, "statistics": statistics}
        return cast(LossOutput, self.loss(generated, positives, unconditional or None, **options))

    def _grouped_features(self, samples: Tensor, inputs: StepInputs) -> Features:
        if self.crops is not None and inputs.squares is not None:
            samples = self.crops(samples, inputs.squares)
        features, groups = dict(self.encode(samples)), len(inputs.positives)
        if self.subsets is not None and inputs.vectors is not None:
            features = self.subsets(features, inputs.vectors[0])
        # One dtype for all features: half of the memory, and the dtype for which the loss has kernels.
        return {k: v.to(self.autocast or v.dtype).unflatten(0, (groups, -1)) for k, v in features.items()}
