"""Inputs and results of one training step, for any kind of sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor

from driftgen.drift.guidance import unconditional_weight
from driftgen.drift.loss import LossOutput

__all__ = ["Features", "StepInputs", "StepOutput", "guided_inputs"]

Features = dict[str, Tensor]


class StepInputs(NamedTuple):
    """Draws of one step on one process: C conditions, for each N generated and P real samples.

    A pytree of tensors, so that micro-batches and CUDA graphs slice and copy it without knowing its parts.

    Attributes:
        noise: pytree of ``[C * N, ...]`` tensors, the first argument of the generator. The samples of one
            condition are adjacent.
        conditions: further arguments of the generator, each a pytree of ``[C, ...]`` tensors: labels and
            alpha for images, observations for a policy.
        positives: ``[C, P, ...]``, real samples of each condition.
        unconditional: ``[C, U, ...]``, additional negatives; None for none.
        unconditional_weight: ``[C]``, the weight of each unconditional negative; None for 1.
        vectors: ``[C, K]``, the draw of :class:`~driftgen.training.vector_subsets.VectorSubsets`, once for
            each condition; None for all vectors.
        squares: ``[C, 3]``, the draw of :class:`~driftgen.training.shared_crops.SharedCrops`; None for whole
            samples.
    """

    noise: Any
    conditions: tuple[Any, ...]
    positives: Tensor
    unconditional: Tensor | None = None
    unconditional_weight: Tensor | None = None
    vectors: Tensor | None = None
    squares: Tensor | None = None


@dataclass(frozen=True)
class StepOutput:
    """Metrics of one step.

    Attributes:
        loss: scalar, over all processes.
        drift: raw drift of each feature, ``[len(temperatures)]``.
        scale: mean distance of each feature, scalar.
        generated: features ``[C, N, V, D]`` of generated samples, without gradient. With micro-batches in
            mode "previous", those of the last micro-batch.
        positives: features ``[C, P, V, D]`` of the positives, likewise.
    """

    loss: Tensor
    drift: Features
    scale: Features
    generated: Features
    positives: Features

    @classmethod
    def from_loss(cls, out: LossOutput, generated: Features, positives: Features) -> StepOutput:
        """Return the metrics of a loss over a feature set."""
        drift, scale = cast(Features, out.drift), cast(Features, out.scale)
        samples = {name: value.detach() for name, value in generated.items()}
        return cls(out.loss.detach(), drift, scale, samples, positives)


def guided_inputs(
    noise: Any, labels: Tensor, alpha: Tensor, positives: Tensor, unconditional: Tensor, *, generated: int
) -> StepInputs:
    """Return the inputs of a class-conditional step, with unconditional negatives weighted by alpha.

    Args:
        noise: of ``C * generated`` samples.
        labels: ``[C]``.
        alpha: ``[C]``, guidance of each label.
        positives: ``[C, P, ...]``.
        unconditional: ``[C, U, ...]``; U may be 0.
        generated: N, generated samples per label.
    """
    if unconditional.shape[1] == 0:
        return StepInputs(noise, (labels, alpha), positives)
    weight = unconditional_weight(alpha, generated, unconditional.shape[1])
    return StepInputs(noise, (labels, alpha), positives, unconditional, weight)
