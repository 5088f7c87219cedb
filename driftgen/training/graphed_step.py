"""A training step as a CUDA graph: hundreds of launches cost the host as much as one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from driftgen.errors import InputError, explained
from driftgen.ops.cuda_graphs import CaptureError, SynchronizationError, capture
from driftgen.support.distributed import Distributed
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.policy_config import PolicyConfig

__all__ = ["GraphedStep", "can_capture"]

Inputs = TypeVar("Inputs")
Output = TypeVar("Output")


def can_capture(config: TrainConfig | PretrainConfig | PolicyConfig, distributed: Distributed) -> bool:
    """Return True if the steps of a run should be captured: undivided steps of one process on a GPU.

    Micro-batches keep a GPU busy without a graph, and mode "previous" replaces the tensors it reads.
    Activation checkpointing reads the RNG state on the host.
    """
    whole = config.micro == 1 if isinstance(config, PretrainConfig) else _is_whole(config)
    return whole and config.cuda_graph and distributed.device.type == "cuda" and distributed.group is None


def _is_whole(config: TrainConfig | PolicyConfig) -> bool:
    return config.batch.micro == 1 and not getattr(config, "checkpoint_blocks", False)


class _CapturedStep(NamedTuple, Generic[Output]):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]  # static tensors that the graph reads
    output: Output
    gradients: list[Tensor | None]


class GraphedStep(Generic[Inputs, Output]):
    """A step as a CUDA graph, captured at the first call and again when shapes change.

    Returns the same bits as the step, with two differences: gradients replace those in ``.grad``, and the
    next call overwrites the output. The parameters must not be reallocated. A step that synchronizes with
    the GPU cannot be captured and runs without a graph.

    Args:
        step: function of a pytree of tensors that adds gradients to ``.grad``, such as
            :class:`~driftgen.training.step.DriftStep`; undivided, of one process.
        parameters: the parameters that receive gradients.
        info: called with one line if the step cannot be captured.
        variant: names what the step computes besides its inputs, such as the encoders in use. Each variant
            has a graph of its own.
    """

    def __init__(
        self,
        step: Callable[[Inputs], Output],
        parameters: Iterable[nn.Parameter],
        info: Callable[[str], None] = lambda text: None,
        variant: Callable[[], Hashable] = lambda: None,
    ) -> None:
        self.step, self.info, self.variant = step, info, variant
        self.parameters = [p for p in parameters if p.requires_grad]
        self.capturable = True
        self._captured: dict[Hashable, _CapturedStep[Output]] = {}

    def __call__(self, inputs: Inputs) -> Output:
        """Compute the gradient of one step into ``.grad``."""
        tensors = _tensors(inputs)
        captured = self._captured.get(self.variant())
        if captured is None or _shapes(captured.inputs) != _shapes(tensors):
            captured = self._capture(inputs) if self.capturable else None
        if captured is None:
            return self.step(inputs)
        for static, tensor in zip(captured.inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        captured.graph.replay()
        for parameter, gradient in zip(self.parameters, captured.gradients, strict=True):
            parameter.grad = gradient
        return captured.output

    def _capture(self, inputs: Inputs) -> _CapturedStep[Output] | None:
        variant = self.variant()
        self._captured.pop(variant, None)  # free the memory of the old graph first
        static = tree_map_only(Tensor, torch.clone, inputs)

        def compute() -> Output:
            self._clear_gradients()
            return self.step(static)

        try:
            graph, output = capture(compute, torch.cuda.Stream(self.parameters[0].device))
        except SynchronizationError as error:
            self.capturable = False
            self._clear_gradients()
            message = f"CUDA graph disabled: {error}; set cuda_graph=false to skip capture"
            self.info(explained(message, "cuda-graph-disabled"))
            return None
        except CaptureError as error:
            raise InputError(f"training step: {error}; set cuda_graph=false") from None
        gradients = [p.grad for p in self.parameters]
        captured = self._captured[variant] = _CapturedStep(graph, _tensors(static), output, gradients)
        return captured

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _tensors(inputs: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _shapes(tensors: list[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]
