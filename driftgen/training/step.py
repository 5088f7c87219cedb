"""The gradient of one training step (appendix "Training Loop", points 3 to 7 without the update): whole, or
in parts that need less memory."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from driftgen.drift.guidance import unconditional_weight
from driftgen.drift.loss import DriftingLoss, LossOutput, Statistics
from driftgen.features.stack import FeatureStack
from driftgen.generators.base import Noise

__all__ = ["DriftStep", "StepInputs", "StepOutput"]

Features = dict[str, Tensor]


@dataclass(frozen=True)
class StepInputs:
    """Everything that one step of this process is computed from.

    Attributes:
        labels: ``[C]``.
        alpha: ``[C]``, the guidance of each label.
        noise: for C · N samples, those of one label side by side.
        positives: ``[C, P, ...]``.
        unconditional: ``[C, U, ...]``; U may be 0.
    """

    labels: Tensor
    alpha: Tensor
    noise: Noise
    positives: Tensor
    unconditional: Tensor


@dataclass(frozen=True)
class StepOutput:
    """What a step found: the loss over all processes, drift and scale of each feature, and the features of
    (some of) its samples, for the health of the run.
    """

    loss: Tensor
    drift: dict[str, Tensor]
    scale: dict[str, Tensor]
    generated: Features
    positives: Features


class DriftStep:
    """Adds the gradient of the drifting loss to ``.grad`` of the generator's parameters.

    ``micro`` parts of the classes, one after the other, need about ``1 / micro`` of the activations:

    - ``"exact"``: all samples are made and encoded once without gradient; the loss of the whole step gives
      the gradient to each of their features; then each part is made again with gradient and passes its share
      back. Equal to the undivided step up to rounding. Costs one more forward pass of the generated samples,
      and keeps the features (not the activations) of the whole step.
    - ``"previous"``: each part is compared with the scales and drift norms of the step before. One pass,
      nothing kept. The first step measures its own in two more passes, so it is exact.

    Args:
        generator: f, perhaps wrapped in DistributedDataParallel, or shared by ``fully_shard``.
        phi: what the drift is measured in.
        loss: with the process group, if any.
        generated: N, samples per class.
        micro: parts.
        mode: ``"exact"`` or ``"previous"``.
        autocast: number type of the networks on this device; None for float32.
    """

    def __init__(
        self,
        generator: nn.Module,
        phi: FeatureStack,
        loss: DriftingLoss,
        *,
        generated: int,
        micro: int = 1,
        mode: Literal["exact", "previous"] = "exact",
        autocast: torch.dtype | None = None,
    ) -> None:
        self.generator, self.phi, self.loss = generator, phi, loss
        self.generated, self.micro, self.mode, self.autocast = generated, micro, mode, autocast
        self.previous: Statistics | None = None
        group = loss.settings.process_group
        # DDP and FSDP average gradients over processes, the loss means their sum.
        self.processes = 1 if group is None else dist.get_world_size(group)

    def __call__(self, drawn: StepInputs) -> StepOutput:
        """The gradient of the step; the caller clears ``.grad`` before."""
        if self.micro == 1:
            return self._whole(drawn)
        if self.mode == "exact":
            return self._exact(drawn)
        output = self._with_previous(drawn, self.previous or self._measured(drawn))
        groups = len(drawn.labels) * self.processes
        self.previous = Statistics(
            torch.stack(list(output.scale.values())), torch.stack(list(output.drift.values())), groups
        )
        return output

    def _whole(self, drawn: StepInputs) -> StepOutput:
        generated = self._generated_features(drawn, self.generator)
        positives, unconditional = self._real_features(drawn)
        out = self._loss(drawn, generated, positives, unconditional)
        (out.loss * self.processes).backward()
        return _output(out.loss, out, generated, positives)

    def _exact(self, drawn: StepInputs) -> StepOutput:
        plain = getattr(self.generator, "module", self.generator)
        generated, positives, unconditional = FeatureBuffer(), FeatureBuffer(), FeatureBuffer()
        total = len(drawn.labels)
        with torch.no_grad():
            for part, classes in self._parts(drawn):
                generated.put(self._generated_features(part, plain), classes, total)
                found = self._real_features(part)
                positives.put(found[0], classes, total)
                unconditional.put(found[1], classes, total)
        leaves = {name: value.requires_grad_() for name, value in generated.tensors.items()}
        out = self._loss(drawn, leaves, positives.tensors, unconditional.tensors)
        (out.loss * self.processes).backward()
        output = _output(out.loss, out, leaves, positives.tensors)
        del positives, unconditional
        for part, classes in self._parts(drawn):
            with self._synchronised(classes.stop == total):
                features = self._generated_features(part, self.generator)
                gradients = [cast(Tensor, leaves[name].grad)[classes] for name in features]
                torch.autograd.backward(list(features.values()), gradients)
        return output

    @torch.no_grad()
    def _measured(self, drawn: StepInputs) -> Statistics:
        """Scale and drift norms of the whole step, part by part: first the one, then, given it, the other."""
        ones = torch.ones((), device=drawn.labels.device)
        groups = len(drawn.labels) * self.processes
        statistics = Statistics(ones, ones, groups)
        plain = getattr(self.generator, "module", self.generator)
        for _ in range(2):
            sums = _Sums()
            for part, _rows in self._parts(drawn):
                generated = self._generated_features(part, plain)
                out = self._loss(part, generated, *self._real_features(part), statistics)
                sums.add(out, self._pairs(part))
            _, scale, drift = self._shared(sums)
            statistics = Statistics(scale, drift, groups)
        return statistics

    def _with_previous(self, drawn: StepInputs, statistics: Statistics) -> StepOutput:
        total, sums = len(drawn.labels), _Sums()
        for part, classes in self._parts(drawn):
            with self._synchronised(classes.stop == total):
                generated = self._generated_features(part, self.generator)
                positives, unconditional = self._real_features(part)
                out = self._loss(part, generated, positives, unconditional, statistics)
                (out.loss * self.processes).backward()
            sums.add(out, self._pairs(part))
        loss, scale, drift = self._shared(sums)
        names = list(_dict(out.scale))
        drifts, scales = (dict(zip(names, t.unbind(), strict=True)) for t in (drift, scale))
        return StepOutput(loss, drifts, scales, _detached(generated), positives)

    def _pairs(self, drawn: StepInputs) -> Tensor:
        """The weight that the mean distance of a part has in that of the whole step."""
        u = drawn.unconditional.shape[1]
        each = self.generated + drawn.positives.shape[1]
        if u == 0:
            return drawn.alpha.new_tensor(float(each * len(drawn.labels)))
        return (each + u * unconditional_weight(drawn.alpha, self.generated, u)).sum()

    def _shared(self, sums: _Sums) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, scale and drift of the whole step, in one collective."""
        flat = torch.cat([t.flatten() for t in sums.values])
        if self.processes > 1:
            dist.all_reduce(flat, group=self.loss.settings.process_group)
        loss, weight, scale, drift = flat.split([t.numel() for t in sums.values])
        return loss[0], scale / weight, drift.reshape(sums.values[3].shape)

    def _parts(self, drawn: StepInputs) -> Iterator[tuple[StepInputs, slice]]:
        """The classes in ``micro`` parts of about the same size."""
        classes, n = len(drawn.labels), self.generated
        edges = [round(i * classes / self.micro) for i in range(self.micro + 1)]
        for start, stop in itertools.pairwise(edges):
            if start == stop:
                continue
            rows = slice(start, stop)
            samples = slice(start * n, stop * n)
            noise = type(drawn.noise)(*(t[samples] for t in drawn.noise))
            part = StepInputs(
                drawn.labels[rows],
                drawn.alpha[rows],
                noise,
                drawn.positives[rows],
                drawn.unconditional[rows],
            )
            yield part, rows

    def _generated_features(self, drawn: StepInputs, generator: nn.Module) -> Features:
        n = self.generated
        with self._precision(drawn.labels.device):
            samples = generator(
                drawn.noise, drawn.labels.repeat_interleave(n), drawn.alpha.repeat_interleave(n)
            )
            return _grouped(self._encode(samples), len(drawn.labels))

    def _encode(self, samples: Tensor) -> Features:
        """φ of samples, all in the number type of the networks: half of the memory, and the one type that the
        loss is fast in.
        """
        if self.autocast is None:
            return self.phi.features(samples)
        return {k: v.to(self.autocast) for k, v in self.phi.features(samples).items()}

    @torch.no_grad()
    def _real_features(self, drawn: StepInputs) -> tuple[Features, Features]:
        real = torch.cat([drawn.positives, drawn.unconditional], dim=1)
        with self._precision(real.device):
            features = _grouped(self._encode(real.flatten(0, 1)), len(real))
        p = drawn.positives.shape[1]
        negatives = {k: v[:, p:] for k, v in features.items()} if drawn.unconditional.shape[1] else {}
        return {k: v[:, :p] for k, v in features.items()}, negatives

    def _loss(
        self,
        drawn: StepInputs,
        generated: Features,
        positives: Features,
        unconditional: Features,
        statistics: Statistics | None = None,
    ) -> LossOutput:
        u = drawn.unconditional.shape[1]
        weight = unconditional_weight(drawn.alpha, self.generated, u) if u else None
        out: LossOutput = self.loss(
            generated, positives, unconditional or None, negative_weight=weight, statistics=statistics
        )
        return out

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)

    def _synchronised(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Gradients cross between processes once a step, with its last part.

        Not where they are shared (FSDP has no ``no_sync``): to wait, each process would hold them whole.
        """
        no_sync = getattr(self.generator, "no_sync", None)
        return contextlib.nullcontext() if last or no_sync is None else no_sync()


class _Sums:
    """What the parts of a step add up to: loss, weight, weighted scale, drift."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def add(self, out: LossOutput, weight: Tensor) -> None:
        scale, drift = (torch.stack(list(_dict(d).values())) for d in (out.scale, out.drift))
        found = [out.loss.detach(), weight.to(scale), scale * weight, drift]
        self.values = found if not self.values else [a + b for a, b in zip(self.values, found, strict=True)]


class FeatureBuffer:
    """Features of a whole step, filled part by part without ever being there twice."""

    def __init__(self) -> None:
        self.tensors: Features = {}

    def put(self, features: Mapping[str, Tensor], classes: slice, total: int) -> None:
        for name, value in features.items():
            if name not in self.tensors:
                self.tensors[name] = value.new_empty(total, *value.shape[1:])
            self.tensors[name][classes] = value


def _grouped(features: Features, groups: int) -> Features:
    return {name: value.unflatten(0, (groups, -1)) for name, value in features.items()}


def _detached(features: Mapping[str, Tensor]) -> Features:
    return {name: value.detach() for name, value in features.items()}


def _dict(value: Tensor | dict[str, Tensor]) -> dict[str, Tensor]:
    return cast(dict[str, Tensor], value)


def _output(loss: Tensor, out: LossOutput, generated: Features, positives: Features) -> StepOutput:
    return StepOutput(
        loss.detach(), _dict(out.drift), _dict(out.scale), _detached(generated), _detached(positives)
    )
