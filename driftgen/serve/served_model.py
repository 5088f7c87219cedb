"""The model behind a server: a generator of images or a policy, computed in batches of few sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError
from driftgen.generators.base import Noise
from driftgen.interop.model_sources import holds_policy
from driftgen.ops.padding import batch_sizes, pad_rows, padded_size
from driftgen.pipeline import DriftPipeline
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.support.distributed import choose_device
from driftgen.support.dtype_names import parse_dtype

__all__ = ["ModelOptions", "ServedImages", "ServedPolicy", "load_served"]

Parts = Sequence[tuple[int, int, int]]


@dataclass(frozen=True)
class ModelOptions:
    """The served model, and options of its computation.

    Attributes:
        model: packaged name, saved model, run, artifact, ``owner/repository`` or ``hf://name``.
        batch_size: rows of the largest batch.
        exact: pad every batch to ``batch_size``, so that an image has the same bits in every batch.
        weights: set of weights of a run.
        device: the best one available if None.
        dtype: of the generator.
        tokenizer: SD-VAE that decodes latents.
        compiled: compile the generator.
        fp8: FP8 matrix products of a DiT.
        verify: compare the weights with their checksums.
    """

    model: str
    batch_size: int = 64
    exact: bool = False
    weights: str | None = None
    device: str | None = None
    dtype: str = "as saved"
    tokenizer: str | None = None
    compiled: bool = False
    fp8: bool = False
    verify: bool = True

    def check(self) -> bool:
        """Find the model and return True if it is a policy, which some options do not apply to."""
        policy = holds_policy(self.model, self.weights)
        given = {
            "--tokenizer": self.tokenizer is not None,
            "--compile": self.compiled,
            "--fp8": self.fp8,
            "--dtype": self.dtype != "as saved",
        }
        named = [name for name, is_given in given.items() if is_given]
        if policy and named:
            verb = "applies" if len(named) == 1 else "apply"
            raise InputError(f"{self.model} is a policy: {' and '.join(named)} {verb} to image models alone")
        return policy


def load_served(options: ModelOptions) -> ServedImages | ServedPolicy:
    """Load a model and compute one batch of each size, so that no request pays for a first call."""
    served: ServedImages | ServedPolicy
    if options.check():
        policy = DriftingPolicy.from_pretrained(
            options.model,
            weights=options.weights,
            device=str(choose_device(options.device)),
            verify=options.verify,
        )
        served = ServedPolicy(policy, options.batch_size, exact=options.exact)
    else:
        pipe = DriftPipeline.from_pretrained(
            options.model,
            weights=options.weights,
            device=choose_device(options.device),
            dtype=parse_dtype(options.dtype),
            tokenizer=options.tokenizer,
            batch_size=options.batch_size,
            fp8=options.fp8,
            verify=options.verify,
        )
        served = ServedImages(pipe, exact=options.exact, compiled=options.compiled)
    served.warm_up()
    return served


class _Images(NamedTuple):
    noise: Noise
    labels: list[int]
    guidance: float


class ServedImages:
    """Images of a pipeline. A request has ``seed``, ``labels`` and ``guidance``.

    Image i of a request is image i of its seed, as the pipeline samples it: up to rounding, which depends on
    the size of the batch, or bit for bit if ``exact``.
    """

    def __init__(self, pipe: DriftPipeline, *, exact: bool = False, compiled: bool = False) -> None:
        self.pipe, self.exact = pipe, exact
        self.sizes = [pipe.batch_size] if exact else batch_sizes(pipe.batch_size)
        if not isinstance(pipe.noise(1, 0), Noise):
            raise InputError("a generator whose sample_noise returns no Noise cannot be served in batches")
        pipe.check(output="numpy")
        if compiled:
            pipe.compile(max_graphs=len(self.sizes))
        else:
            pipe.capture(max_graphs=len(self.sizes))
        self._requests: dict[int, _Images] = {}
        self._shape: list[int] = []

    def describe(self) -> dict[str, Any]:
        """Return what the other process needs to know, for JSON."""
        return {
            "kind": "images",
            "num_classes": self.pipe.num_classes,
            "class_names": self.pipe.class_names,
            "guidance": self.pipe.guidance,
            "image_shape": self._shape,
            "sizes": self.sizes,
            "device": str(self.pipe.device),
            "model": repr(self.pipe),
        }

    def warm_up(self) -> None:
        """Compute one batch of each size."""
        for size in self.sizes:
            images = self.pipe.generate(self.pipe.noise(size, 0), [0] * size, [1.0] * size, size=size)
        self._shape = list(images.shape[1:])

    def add(self, ticket: int, request: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Draw the noise of a request."""
        labels = list(request["labels"])
        noise = self.pipe.noise(len(labels), request["seed"])
        self._requests[ticket] = _Images(noise, labels, float(request["guidance"]))

    def drop(self, ticket: int) -> None:
        """Forget a request."""
        self._requests.pop(ticket, None)

    def run(self, parts: Parts) -> NDArray[np.uint8]:
        """Return images ``[B, H, W, C]`` of requests, in this order; zeros for dropped ones."""
        noises: list[Noise] = []
        labels: list[int] = []
        guidance: list[float] = []
        rows: list[int] = []  # of the result that are computed
        first = 0
        for ticket, start, stop in parts:
            request = self._requests.get(ticket)
            if request is not None:
                noises.append(Noise(*(tensor[start:stop] for tensor in request.noise)))
                labels += request.labels[start:stop]
                guidance += [request.guidance] * (stop - start)
                rows += range(first, first + stop - start)
                if stop == len(request.labels):
                    self._requests.pop(ticket, None)  # which the other thread may just have dropped
            first += stop - start
        if not noises:
            return np.zeros((first, *self._shape), np.uint8)
        noise = Noise(*(_joined(tensors) for tensors in zip(*noises, strict=True)))
        size = self.pipe.batch_size if self.exact else None
        images: NDArray[np.uint8] = self.pipe.generate(noise, labels, guidance, size=size)
        return _spread(images, rows, first)


class ServedPolicy:
    """Chunks of a policy. A request has ``seed``, and its arrays are one history per key of the observation.

    The chunk of a seed and an observation is that of ``policy.predict(observation, seed=seed)``.
    """

    def __init__(self, policy: DriftingPolicy, batch_size: int, *, exact: bool = False) -> None:
        self.policy, self.batch_size, self.exact = policy, batch_size, exact
        self.sizes = [batch_size] if exact else batch_sizes(batch_size)
        policy.capture(max_graphs=len(self.sizes))
        self._requests: dict[int, tuple[Tensor, Mapping[str, NDArray[Any]]]] = {}

    def describe(self) -> dict[str, Any]:
        """Return what the other process needs to know, for JSON."""
        network = self.policy.network
        calls = "1 network call" if self.policy.calls == 1 else f"{self.policy.calls} network calls"
        return {
            "kind": "actions",
            "observations": {key: list(shape) for key, shape in network.observations.items()},
            "observed": self.policy.observed,
            "executed": self.policy.executed,
            "horizon": self.policy.horizon,
            "action_size": network.action_size,
            "sizes": self.sizes,
            "device": str(self.policy.device),
            "model": f"{type(network).__name__} ({network.method}, {calls})",
        }

    def warm_up(self) -> None:
        """Compute one batch of each size."""
        shapes = self.policy.network.observations
        blank = {
            key: np.zeros((self.policy.observed, *shape), np.uint8 if len(shape) == 3 else np.float32)
            for key, shape in shapes.items()
        }
        for size in self.sizes:
            for ticket in range(size):
                self.add(ticket, {"seed": 0}, blank)
            self.run([(ticket, 0, 1) for ticket in range(size)])

    def add(self, ticket: int, request: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Draw the noise of a request."""
        generator = torch.Generator().manual_seed(int(request["seed"]))
        self._requests[ticket] = self.policy.network.sample_noise(1, generator), arrays

    def drop(self, ticket: int) -> None:
        """Forget a request."""
        self._requests.pop(ticket, None)

    def run(self, parts: Parts) -> NDArray[Any]:
        """Return chunks ``[B, horizon, A]`` of requests, in this order; zeros for dropped ones."""
        found = [(row, self._requests.pop(ticket, None)) for row, (ticket, _, _) in enumerate(parts)]
        known = [(row, request) for row, request in found if request is not None]
        shape = (self.policy.horizon, self.policy.network.action_size)
        if not known:
            return np.zeros((len(parts), *shape), np.float32)
        size = self.batch_size if self.exact else padded_size(len(known), self.batch_size)
        noise = pad_rows(_joined([noise for _, (noise, _) in known]), size)
        repeated = [arrays for _, (_, arrays) in known]
        repeated += [repeated[-1]] * (size - len(known))
        observations = {key: np.stack([arrays[key] for arrays in repeated]) for key in repeated[0]}
        chunks = self.policy.predict(observations, noise)[: len(known)]
        return _spread(chunks, [row for row, _ in known], len(parts))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _spread(computed: NDArray[Any], rows: Sequence[int], count: int) -> NDArray[Any]:
    """Return ``count`` rows: the computed ones in their places, zeros in the others."""
    if len(rows) == count:
        return computed
    spread = np.zeros((count, *computed.shape[1:]), computed.dtype)
    spread[list(rows)] = computed
    return spread
