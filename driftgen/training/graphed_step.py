"""A training step whose launches are recorded once: hundreds of them then cost the host as much as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.base import Noise
from driftgen.ops.cuda_graphs import CaptureError, SynchronizationError, capture
from driftgen.training.config import TrainConfig
from driftgen.training.distributed import Distributed
from driftgen.training.step import DriftStep, StepInputs, StepOutput

__all__ = ["GraphedStep", "can_capture"]


def can_capture(config: TrainConfig, processes: Distributed) -> bool:
    """Whether the steps of a run are worth recording, and may be: whole steps of one process on a GPU.

    Parts keep a GPU busy as they are, those of "previous" change what they read; checkpointing looks at the
    state of the random numbers.
    """
    return (
        config.cuda_graph
        and processes.device.type == "cuda"
        and processes.group is None
        and config.batch.micro == 1
        and not config.checkpoint_blocks
    )


class _CapturedStep(NamedTuple):
    graph: torch.cuda.CUDAGraph
    drawn: StepInputs  # where it reads
    output: StepOutput
    gradients: list[Tensor | None]


class GraphedStep:
    """A :class:`DriftStep` as a CUDA graph, recorded at the first call and whenever the sizes change.

    Takes and gives what the step does, to the last bit; but gradients replace those that are there, and what
    it gives is overwritten by the next call. The parameters must stay where they are. A step that cannot be
    recorded, as its networks wait for numbers on the GPU, is computed launch by launch instead.

    Args:
        step: whole, of one process.
        parameters: those that get gradients.
        info: told why, if it cannot be recorded.
    """

    def __init__(
        self,
        step: DriftStep,
        parameters: Iterable[nn.Parameter],
        info: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.step, self.info = step, info
        self.parameters = [p for p in parameters if p.requires_grad]
        self.capturable = True
        self._captured: _CapturedStep | None = None

    def __call__(self, drawn: StepInputs) -> StepOutput:
        """The gradient of the step, in ``.grad``."""
        found = self._captured
        if found is None or _sizes(found.drawn) != _sizes(drawn):
            found = self._capture(drawn) if self.capturable else None
        if found is None:
            return self.step(drawn)
        for static, tensor in zip(_tensors(found.drawn), _tensors(drawn), strict=True):
            static.copy_(tensor, non_blocking=True)
        found.graph.replay()
        for parameter, gradient in zip(self.parameters, found.gradients, strict=True):
            parameter.grad = gradient
        return found.output

    def _capture(self, drawn: StepInputs) -> _CapturedStep | None:
        self._captured = None  # its memory goes before there is a new one
        static = StepInputs(
            drawn.labels.clone(),
            drawn.alpha.clone(),
            Noise(*(tensor.clone() for tensor in drawn.noise)),
            drawn.positives.clone(),
            drawn.unconditional.clone(),
        )

        def compute() -> StepOutput:
            self._clear()
            return self.step(static)

        try:
            graph, output = capture(compute)
        except SynchronizationError as error:
            self.capturable = False
            self._clear()
            self.info(f"steps run launch by launch: {error}; cuda_graph=false leaves out the attempt")
            return None
        except CaptureError as error:
            raise InputError(f"a training step: {error}; try --set cuda_graph=false") from None
        self._captured = _CapturedStep(graph, static, output, [p.grad for p in self.parameters])
        return self._captured

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _tensors(drawn: StepInputs) -> list[Tensor]:
    return [drawn.labels, drawn.alpha, *drawn.noise, drawn.positives, drawn.unconditional]


def _sizes(drawn: StepInputs) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in _tensors(drawn)]
