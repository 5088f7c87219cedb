"""Networks as export formats take them: a module from named tensors to one tensor, and its metadata."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

import driftgen
from driftgen.errors import InputError
from driftgen.generators.base import Generator, Noise
from driftgen.generators.fp8 import has_fp8
from driftgen.generators.observation_encoder import is_image
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.support.checked_arguments import show_value
from driftgen.support.portable_noise import NAME

__all__ = ["BATCH", "Graph", "Pipeline", "Policy", "make_graph"]

BATCH = "batch"  # name of the dynamic dimension
EXAMPLES = 3  # rows of the inputs that the network is traced with; 1 would become a constant
VERSION = 1
IMAGES, SAMPLES, ACTIONS = "images", "samples", "actions"  # names of the outputs
NOISE, STYLE, LABELS, ALPHA = "noise", "style", "labels", "alpha"  # names of the inputs


class Pipeline(Protocol):
    """The parts of a :class:`~driftgen.pipeline.DriftPipeline` that a graph needs."""

    generator: nn.Module
    class_names: list[str] | None
    guidance: float
    source: dict[str, Any]

    @property
    def tokenizer(self) -> Any: ...


class Policy(Protocol):
    """The parts of a :class:`~driftgen.policy.DriftingPolicy` that a graph needs."""

    network: PolicyNetwork
    processor: Any
    source: dict[str, Any]


@dataclass(frozen=True)
class Graph:
    """A network to export.

    Attributes:
        module: ``forward(*inputs)``.
        inputs: an example of each input by name; the first dimension is the batch.
        output: name of the result.
        metadata: JSON-serializable description.
    """

    module: nn.Module
    inputs: dict[str, Tensor]
    output: str
    metadata: dict[str, Any]


def make_graph(model: nn.Module | Pipeline | Policy, *, decoder: bool = True) -> Graph:
    """Return the graph of a generator, a pipeline, a policy or a policy's network, in float32 on the CPU.

    The graph has copies of the weights: compiled blocks are not compiled in it, and the model stays as it is.

    Args:
        model: a generator returns its samples; a pipeline decodes and clips them to [-1, 1]. A policy takes
            and returns the units of the environment, its network alone those of [-1, 1].
        decoder: include the decoder of a latent model; its latents are the output otherwise.
    """
    given: Any = model
    if isinstance(given, PolicyNetwork):
        return _policy_graph(given, None, {})
    if isinstance(getattr(given, "network", None), PolicyNetwork):
        return _policy_graph(given.network, given.processor, given.source)
    if isinstance(given, nn.Module) and isinstance(given, Generator):
        return _image_graph(given, None, images=False)
    if isinstance(getattr(given, "generator", None), Generator):
        tokenizer = given.tokenizer if decoder else None
        return _image_graph(given.generator, tokenizer, images=decoder, about=given)
    raise InputError(
        f"{show_value(given)} cannot be exported: give a DriftPipeline, a DriftingPolicy, a generator of "
        "images or a PolicyNetwork"
    )


# --- images ---------------------------------------------------------------------------------------------


class _ImageModule(nn.Module):
    """decode(f(ε, c, α)) with the parts of the noise as inputs of their own."""

    def __init__(self, generator: nn.Module, tokenizer: Any, styles: bool, images: bool) -> None:
        super().__init__()
        self.generator, self.tokenizer = generator, tokenizer
        self.styles, self.images = styles, images

    def forward(self, *inputs: Tensor) -> Tensor:
        gaussian, labels, alpha = inputs[0], inputs[-2], inputs[-1]
        style = inputs[1] if self.styles else labels.new_zeros(labels.shape[0], 0)
        samples: Tensor = self.generator(Noise(gaussian, style), labels, alpha)
        if self.tokenizer is not None:
            samples = self.tokenizer.decode(samples)
        return samples.float().clamp(-1, 1) if self.images else samples.float()


def _image_graph(
    generator: nn.Module, tokenizer: Any, *, images: bool, about: Pipeline | None = None
) -> Graph:
    if has_fp8(generator):
        raise InputError("a pipeline with fp8 cannot be exported: load the model without fp8")
    network = _copied(generator)
    noise = network.sample_noise(EXAMPLES)
    if not isinstance(noise, Noise):
        raise InputError(f"{type(generator).__name__}.sample_noise must return a driftgen.generators.Noise")
    styles = noise.style.shape[1] > 0
    config = getattr(network, "config", None)
    layout = [{"input": NOISE, "shape": list(noise.gaussian.shape[1:]), "distribution": "normal"}]
    inputs = {NOISE: noise.gaussian.float()}
    if styles:
        entries = getattr(config, "style_entries", None)
        if entries is None:
            raise InputError(f"{type(generator).__name__} has styles, but no config.style_entries")
        layout.append(
            {"input": STYLE, "shape": [noise.style.shape[1]], "distribution": "integers", "entries": entries}
        )
        inputs[STYLE] = noise.style.long()
    inputs |= {LABELS: torch.zeros(EXAMPLES, dtype=torch.int64), ALPHA: torch.ones(EXAMPLES)}
    decodes = tokenizer is not None and getattr(tokenizer, "kind", None) != "identity"
    module = _ImageModule(network, _copied(tokenizer) if decodes else None, styles, images)
    output = IMAGES if images else SAMPLES
    names = None if about is None else about.class_names
    facts = {} if about is None else {"source": about.source}
    number = getattr(config, "num_classes", None) or (len(names) if names else None)
    described = {
        "classes": {"number": number, "names": names},
        "guidance": {
            "default": 1.0 if about is None else about.guidance,
            "range": None if about is None else about.source.get("guidance_range"),
        },
        "decoder": tokenizer.options() if decodes else None,
    }
    result = module(*inputs.values())
    metadata = _metadata("generator", generator, inputs, output, result, layout) | described | facts
    if images:
        metadata["outputs"][output]["range"] = [-1, 1]
    return Graph(module, inputs, output, metadata)


# --- policies -------------------------------------------------------------------------------------------


class _PolicyModule(nn.Module):
    """a = f(ε, o) in the units of the processor, or normalized without one; regression has no noise."""

    def __init__(self, network: PolicyNetwork, processor: Any) -> None:
        super().__init__()
        self.network, self.processor = network, processor

    def forward(self, *inputs: Tensor) -> Tensor:
        network, first = self.network, inputs[0]
        if network.method == "regression":
            noise = first.new_zeros(
                (first.shape[0], network.horizon, network.action_size), dtype=torch.float32
            )
            rest = inputs
        else:
            noise, rest = first, inputs[1:]
        observations = dict(zip(network.observations, rest, strict=True))
        if self.processor is None:
            return cast(Tensor, network(noise, observations))
        prepared = self.processor.prepare(observations, noise.device)
        return cast(Tensor, self.processor.restore_actions(network(noise, prepared)))


def _policy_graph(policy: PolicyNetwork, processor: Any, source: Mapping[str, Any]) -> Graph:
    if policy.method == "diffusion":
        raise InputError("a diffusion policy takes many network calls per chunk: export a drifting policy")
    network = cast(PolicyNetwork, _copied(policy))
    chunk = (network.horizon, network.action_size)
    layout: list[dict[str, Any]] = []
    inputs = {}
    if network.method != "regression":
        layout = [{"input": NOISE, "shape": list(chunk), "distribution": "normal"}]
        inputs[NOISE] = torch.zeros(EXAMPLES, *chunk)
    for key, shape in network.observations.items():
        size = shape
        if is_image(key) and processor is None and network.crop is not None:
            size = (*network.crop, 3)
        dtype = torch.uint8 if is_image(key) else torch.float32
        inputs[key] = torch.zeros(EXAMPLES, network.observed, *size, dtype=dtype)
    module = _PolicyModule(network, processor)
    result = module(*inputs.values())
    metadata = _metadata("policy", policy, inputs, ACTIONS, result, layout)
    metadata["policy"] = {
        "units": "normalized" if processor is None else "environment",
        "method": network.method,
        "horizon": network.horizon,
        "observed": network.observed,
        "executed": network.executed,
        "first_action": network.observed - 1,  # the action of the latest observation
    }
    return Graph(module, inputs, ACTIONS, metadata | {"source": dict(source)})


# --- both -----------------------------------------------------------------------------------------------


def _copied(module: Any) -> Any:
    """Return a copy in float32 on the CPU, in eval mode; an object that is no module as it is."""
    if not isinstance(module, nn.Module):
        return module
    return copy.deepcopy(module).to("cpu", torch.float32).eval().requires_grad_(False)


def _metadata(
    kind: str,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    output: str,
    result: Tensor,
    layout: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    return {
        "format": "driftgen",
        "version": VERSION,
        "driftgen": driftgen.__version__,
        "kind": kind,
        "architecture": type(model).__name__,
        "inputs": {name: _described(tensor) for name, tensor in inputs.items()},
        "outputs": {output: _described(result)},
        "noise": {"generator": NAME, "tensors": [dict(tensor) for tensor in layout]},
    }


def _described(tensor: Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": [BATCH, *tensor.shape[1:]], "dtype": dtype}
