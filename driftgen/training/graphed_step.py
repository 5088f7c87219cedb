"""A training step whose launches are recorded once: hundreds of them then cost the host as much as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.base import Noise
from driftgen.ops.cuda_graphs import NotRecordedError, WaitsError, record
from driftgen.training.config import TrainConfig
from driftgen.training.distributed import Processes
from driftgen.training.step import Drawn, DriftStep, StepOutput

__all__ = ["RecordedStep", "can_record"]


def can_record(config: TrainConfig, processes: Processes) -> bool:
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


class _Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    drawn: Drawn  # where it reads
    output: StepOutput
    gradients: list[Tensor | None]


class RecordedStep:
    """A :class:`DriftStep` as a CUDA graph, recorded at the first call and whenever the sizes change.

    Takes and gives what the step does, to the last bit; but gradients replace those that are there, and what
    it gives is overwritten by the next call. The parameters must stay where they are. A step that cannot be
    recorded, as its networks wait for numbers on the GPU, is computed launch by launch instead.

    Args:
        step: whole, of one process.
        parameters: those that get gradients.
        say: told why, if it cannot be recorded.
    """

    def __init__(
        self,
        step: DriftStep,
        parameters: Iterable[nn.Parameter],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.step, self.say = step, say
        self.parameters = [p for p in parameters if p.requires_grad]
        self.recordable = True
        self._recording: _Recording | None = None

    def __call__(self, drawn: Drawn) -> StepOutput:
        """The gradient of the step, in ``.grad``."""
        found = self._recording
        if found is None or _sizes(found.drawn) != _sizes(drawn):
            found = self._record(drawn) if self.recordable else None
        if found is None:
            return self.step(drawn)
        for static, tensor in zip(_tensors(found.drawn), _tensors(drawn), strict=True):
            static.copy_(tensor, non_blocking=True)
        found.graph.replay()
        for parameter, gradient in zip(self.parameters, found.gradients, strict=True):
            parameter.grad = gradient
        return found.output

    def _record(self, drawn: Drawn) -> _Recording | None:
        self._recording = None  # its memory goes before there is a new one
        static = Drawn(
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
            graph, output = record(compute)
        except WaitsError as error:
            self.recordable = False
            self._clear()
            self.say(f"steps run launch by launch: {error}; cuda_graph=false leaves out the attempt")
            return None
        except NotRecordedError as error:
            raise InputError(f"a training step: {error}; try --set cuda_graph=false") from None
        self._recording = _Recording(graph, static, output, [p.grad for p in self.parameters])
        return self._recording

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _tensors(drawn: Drawn) -> list[Tensor]:
    return [drawn.labels, drawn.alpha, *drawn.noise, drawn.positives, drawn.unconditional]


def _sizes(drawn: Drawn) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in _tensors(drawn)]
