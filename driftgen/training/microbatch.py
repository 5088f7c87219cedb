"""A training step in micro-batches: about ``1 / micro`` of the activations of the whole step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from driftgen.drift.loss import LossOutput, Statistics
from driftgen.support.rng import RNGState
from driftgen.training.step import DriftStep
from driftgen.training.step_inputs import Features, StepInputs, StepOutput

__all__ = ["MicroBatchedStep", "reduce_gradients", "take_rows"]

T = TypeVar("T")


class MicroBatchedStep:
    """A :class:`DriftStep` whose conditions are split into micro-batches.

    - ``"exact"``: generate and encode all samples once without gradient, compute the loss of the whole step
      and its gradient with respect to each feature, then generate each micro-batch again with gradient, from
      the same RNG state, and propagate its feature gradients. Equal to the undivided step up to rounding.
      Costs one more forward pass of the generated samples, and holds the features (not the activations) of
      the whole step.
    - ``"previous"``: normalize each micro-batch by the scales and drift norms of the previous step. One pass,
      no feature buffer. The first step measures its own statistics in two additional passes, so it is exact.

    Args:
        step: the undivided step.
        micro: number of micro-batches.
        mode: ``"exact"`` or ``"previous"``.
    """

    def __init__(self, step: DriftStep, micro: int, mode: Literal["exact", "previous"] = "exact") -> None:
        self.step, self.micro, self.mode = step, micro, mode
        self.previous: tuple[Tensor, Tensor] | None = None  # scale and drift of the previous step

    def __call__(self, inputs: StepInputs) -> StepOutput:
        """Compute the gradient of one step; the caller clears ``.grad`` first."""
        if self.mode == "exact":
            return self._exact(inputs)
        groups = len(inputs.positives) * self.step.world_size
        first, old = self.previous is None, self.previous or self._measure_statistics(inputs, groups)
        output = self._with_statistics(inputs, Statistics(*old, groups))
        new = torch.stack(list(output.scale.values())), torch.stack(list(output.drift.values()))
        # The step of a batch that is not finite is skipped, on a GPU without telling the host. Its statistics
        # must not reach the next step.
        scale, drift = (torch.where(n.isfinite(), n, o) for n, o in zip(new, old, strict=True))
        # The host waits for the statistics of the first step only.
        if not first or (scale.isfinite().all() and drift.isfinite().all()):
            self.previous = scale, drift
        return output

    def state_dict(self) -> dict[str, Tensor]:
        """Return the statistics of the previous step, which the next one is normalized by."""
        return {} if self.previous is None else {"scale": self.previous[0], "drift": self.previous[1]}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the statistics of the previous step, if there are any."""
        if "scale" in state:
            self.previous = state["scale"].clone().to(device), state["drift"].clone().to(device)

    def _exact(self, inputs: StepInputs) -> StepOutput:
        step, total = self.step, len(inputs.positives)
        unwrapped = getattr(step.generator, "module", step.generator)
        generated, positives, unconditional = FeatureBuffer(), FeatureBuffer(), FeatureBuffer()
        device, states = inputs.positives.device, []  # RNG states, for dropout: one for each micro-batch
        with torch.no_grad():
            for part, rows in self._split(inputs):
                states.append(RNGState.save(device))
                generated.put(step.generate(part, unwrapped), rows, total)
                for buffer, features in zip((positives, unconditional), step.encode_real(part), strict=True):
                    buffer.put(features, rows, total)
        leaves = {name: value.requires_grad_() for name, value in generated.tensors.items()}
        out = step.compare(inputs, leaves, positives.tensors, unconditional.tensors)
        (out.loss * step.world_size).backward()
        output = StepOutput.from_loss(out, leaves, positives.tensors)
        del positives, unconditional
        last = RNGState.save(device)
        for (part, rows), state in zip(self._split(inputs), states, strict=True):
            state.restore(device)
            with reduce_gradients(step.generator, when=rows.stop == total):
                features = step.generate(part, step.generator)
                gradients = [cast(Tensor, leaves[name].grad)[rows] for name in features]
                torch.autograd.backward(list(features.values()), gradients)
        last.restore(device)
        return output

    @torch.no_grad()
    def _measure_statistics(self, inputs: StepInputs, groups: int) -> tuple[Tensor, Tensor]:
        """Return scale and drift norms of the whole step: one pass for the scale, one for the drift."""
        device = inputs.positives.device
        scale = drift = torch.ones((), device=device)
        state = RNGState.save(device)
        unwrapped = getattr(self.step.generator, "module", self.step.generator)
        for _ in range(2):
            sums = _Sums()
            for part, _rows in self._split(inputs):
                features = self.step.generate(part, unwrapped), *self.step.encode_real(part)
                out = self.step.compare(part, *features, Statistics(scale, drift, groups))
                sums.add(out, self._pair_weight(part))
            _, scale, drift = self._reduce(sums)
            state.restore(device)  # dropout is the same in every pass
        return scale, drift

    def _with_statistics(self, inputs: StepInputs, statistics: Statistics) -> StepOutput:
        step, total, sums = self.step, len(inputs.positives), _Sums()
        for part, rows in self._split(inputs):
            with reduce_gradients(step.generator, when=rows.stop == total):
                generated = step.generate(part, step.generator)
                positives, unconditional = step.encode_real(part)
                out = step.compare(part, generated, positives, unconditional, statistics)
                (out.loss * step.world_size).backward()
            sums.add(out, self._pair_weight(part))
        loss, scale, drift = self._reduce(sums)
        names = list(cast(Features, out.scale))
        drifts, scales = (dict(zip(names, t.unbind(), strict=True)) for t in (drift, scale))
        samples = {name: value.detach() for name, value in generated.items()}
        return StepOutput(loss, drifts, scales, samples, positives)

    def _pair_weight(self, inputs: StepInputs) -> Tensor:
        """Return the weight of a micro-batch's mean distance in that of the whole step."""
        classes, p = inputs.positives.shape[:2]
        pairs = self.step.generated + p
        u = 0 if inputs.unconditional is None else inputs.unconditional.shape[1]
        if inputs.unconditional_weight is None:
            return torch.tensor(float((pairs + u) * classes), device=inputs.positives.device)
        return (pairs + u * inputs.unconditional_weight).sum()

    def _reduce(self, sums: _Sums) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss, scale and drift of the whole step, over all processes in one collective."""
        flat = torch.cat([t.flatten() for t in sums.values])
        if self.step.world_size > 1:
            dist.all_reduce(flat, group=self.step.loss.settings.process_group)
        loss, weight, scale, drift = flat.split([t.numel() for t in sums.values])
        return loss[0], scale / weight, drift.reshape(sums.values[3].shape)

    def _split(self, inputs: StepInputs) -> Iterator[tuple[StepInputs, slice]]:
        """Yield micro-batches of about equal size and their conditions."""
        classes, n = len(inputs.positives), self.step.generated
        edges = [round(i * classes / self.micro) for i in range(self.micro + 1)]
        for start, stop in itertools.pairwise(edges):
            if start == stop:
                continue
            rows, samples = slice(start, stop), slice(start * n, stop * n)
            part = take_rows(inputs._replace(noise=None), rows)
            yield part._replace(noise=take_rows(inputs.noise, samples)), rows


def reduce_gradients(network: nn.Module, *, when: bool) -> contextlib.AbstractContextManager[Any]:
    """Let DDP reduce gradients over processes in the last micro-batch only: ``when=False`` in the others.

    FSDP has no ``no_sync``: it reduces in each micro-batch, so that no process holds whole gradients.
    """
    no_sync = getattr(network, "no_sync", None)
    return contextlib.nullcontext() if when or no_sync is None else no_sync()


def take_rows(tree: T, rows: slice) -> T:
    """Return a pytree with these rows of each tensor."""
    taken: T = tree_map_only(Tensor, lambda tensor: tensor[rows], tree)
    return taken


class _Sums:
    """Sums over micro-batches: loss, weight, weighted scale, drift."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def add(self, out: LossOutput, weight: Tensor) -> None:
        scale, drift = (torch.stack(list(cast(Features, d).values())) for d in (out.scale, out.drift))
        terms = [out.loss.detach(), weight.to(scale), scale * weight, drift]
        self.values = terms if not self.values else [a + b for a, b in zip(self.values, terms, strict=True)]


class FeatureBuffer:
    """Features of a whole step, filled by micro-batches without a second copy."""

    def __init__(self) -> None:
        self.tensors: Features = {}

    def put(self, features: Mapping[str, Tensor], rows: slice, total: int) -> None:
        """Copy the features of some conditions to their rows; the first call allocates ``total`` rows."""
        for name, value in features.items():
            if name not in self.tensors:
                self.tensors[name] = value.new_empty(total, *value.shape[1:])
            self.tensors[name][rows] = value
