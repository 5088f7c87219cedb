"""Fast calls of a network: compiled for the sizes it gets, and recorded as CUDA graphs, in which hundreds of
launches become one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = [
    "CaptureError",
    "GraphedFunction",
    "SynchronizationError",
    "capture",
    "check_compiler",
    "static_shapes",
]

T = TypeVar("T")
# Compiled forms of one piece of code, one for each size of each layer; past it PyTorch would not compile.
MOST_FORMS = 256


def check_compiler(device: torch.device) -> None:
    """A RuntimeError where PyTorch finds no compiler; at the first compiled call it would tell of a page of
    its own code as well.
    """
    if device.type == "cpu":  # for GPUs Triton looks for one, and says so shortly
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()


def static_shapes() -> AbstractContextManager[Any]:
    """What is compiled here is compiled for the sizes it gets: one form for all of them would be slower."""
    patch: AbstractContextManager[Any] = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=MOST_FORMS
    )
    return patch


class CaptureError(InputError):
    """Something cannot be a CUDA graph."""


class SynchronizationError(CaptureError):
    """As it waits for the GPU, such as for a number to look at. Found out before: nothing has happened."""


def capture(
    function: Callable[[], T], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A call as a CUDA graph, and what the call gave: tensors that every replay fills anew.

    It runs three times before: what is compiled or set up at a first call must not be recorded, and a call
    that waits for the GPU is found out. Graphs that share a pool of memory are recorded on one stream.
    """
    stream = stream or torch.cuda.Stream()
    current, graph = torch.cuda.current_stream(stream.device), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
            _check_waits(function)
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    output = function()
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = next(iter(str(error).splitlines()), type(error).__name__)
                raise CaptureError(f"it cannot be recorded as a CUDA graph: {why}") from None
    finally:
        current.wait_stream(stream)
    return graph, output


def _check_waits(function: Callable[[], Any]) -> None:
    """A call in which PyTorch reports what it waits for. Found only while recording, it would leave random
    numbers and memory in a state that nothing can go on from.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # it calls itself a prototype, which does not find everything
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise SynchronizationError("it waits for the GPU, which a CUDA graph cannot") from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CapturedGraph(NamedTuple):
    """A graph, where it reads and where it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class GraphedFunction:
    """A function of tensors on a GPU, without gradient: recorded when it first gets inputs of some sizes, and
    replayed after.

    Inputs are copied to where the recording reads them, and the result is the caller's own. Random numbers
    that the function draws from PyTorch's own generator are new in each replay. The weights it reads must
    stay where they are; :meth:`forget` if they move.

    Args:
        function: has no inputs but its arguments, and does not look at their numbers.
        most: recordings that are kept, those used last. They share their memory, as no two run at once.
    """

    def __init__(self, function: Callable[..., Tensor], most: int = 4) -> None:
        self.function, self.most = function, most
        self.captured: dict[tuple[Any, ...], CapturedGraph] = {}
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Tensor:
        key = tuple((x.shape, x.dtype, x.device) for x in inputs)
        found = self.captured.pop(key, None) or self._capture(inputs)
        self.captured[key] = found  # the last is the one used last
        for static, x in zip(found.inputs, inputs, strict=True):
            static.copy_(x)
        found.graph.replay()
        return found.output.clone()

    def forget(self) -> None:
        """Drops all recordings."""
        self.captured.clear()
        self.stream = None

    def _capture(self, inputs: tuple[Tensor, ...]) -> CapturedGraph:
        while len(self.captured) >= self.most:
            del self.captured[next(iter(self.captured))]
        device = inputs[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        if self.stream is None or self.stream.device != device:
            self.captured.clear()
            self.stream = torch.cuda.Stream(device)
        if not self.captured:
            self.pool = torch.cuda.graph_pool_handle()  # one that no graph uses any more is gone
        static = [x.clone() for x in inputs]
        try:
            # On the stream of the others, or their memory could not be shared.
            graph, output = capture(lambda: self.function(*static), self.stream, self.pool)
        except CaptureError as error:
            raise InputError(f"the generator: {error}") from None
        return CapturedGraph(graph, static, output)
