"""Capture calls as CUDA graphs, which replay hundreds of kernel launches as one."""

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
# Recompilations of one function beyond which PyTorch stops compiling. Static shapes need one per shape of
# each layer, so more than the dynamic ones of :mod:`driftgen.ops.compile`.
STATIC_RECOMPILE_LIMIT = 256


def check_compiler(device: torch.device) -> None:
    """Raise RuntimeError if PyTorch finds no C++ compiler, instead of a long traceback at the first call."""
    if device.type == "cpu":  # for GPUs Triton looks for a compiler and has a short message
        from torch._inductor.cpp_builder import get_cpp_compiler

        get_cpp_compiler()


def static_shapes() -> AbstractContextManager[Any]:
    """Compile for static shapes inside this context: code for dynamic shapes would be slower."""
    patch: AbstractContextManager[Any] = torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, recompile_limit=STATIC_RECOMPILE_LIMIT
    )
    return patch


class CaptureError(InputError):
    """A call cannot be captured as a CUDA graph."""


class SynchronizationError(CaptureError):
    """A call synchronizes with the GPU, for example to read a value. Raised before the capture starts."""


def capture(
    function: Callable[[], T], stream: torch.cuda.Stream | None = None, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a call as a CUDA graph; return the graph and the output, whose tensors every replay overwrites.

    The function runs three times before the capture: to compile and initialize outside of it, and to check
    that it does not synchronize. Graphs that share a memory pool must be captured on one stream.
    """
    stream = stream or torch.cuda.Stream()
    current, graph = torch.cuda.current_stream(stream.device), torch.cuda.CUDAGraph()
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
            _check_synchronization(function)
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    output = function()
            except torch.cuda.OutOfMemoryError:
                raise
            except RuntimeError as error:
                why = next(iter(str(error).splitlines()), type(error).__name__)
                raise CaptureError(f"the CUDA graph cannot be captured: {why}") from None
    finally:
        current.wait_stream(stream)
    return graph, output


def _check_synchronization(function: Callable[[], Any]) -> None:
    """Call the function once and raise SynchronizationError if it waits for the GPU.

    During a capture, the error would leave RNG state and memory pools unusable.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():  # PyTorch warns that this mode is a prototype
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        function()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        raise SynchronizationError("the call waits for the GPU, which a CUDA graph cannot do") from None
    finally:
        torch.cuda.set_sync_debug_mode(before)


class CapturedGraph(NamedTuple):
    """A graph with its static input and output tensors."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class GraphedFunction:
    """A function of CUDA tensors without gradients, captured once for each set of input shapes and replayed.

    Inputs are copied to static tensors, and the result is a copy. Each replay draws new random numbers from
    PyTorch's default generator. The weights that the function reads must keep their addresses: call
    :meth:`forget` when they move.

    Args:
        function: depends on nothing but its arguments, and does not read their values on the host.
        max_graphs: number of graphs to keep, the most recently used. They share one memory pool, since no two
            run at once.
    """

    def __init__(self, function: Callable[..., Tensor], max_graphs: int = 4) -> None:
        self.function, self.max_graphs = function, max_graphs
        self.captured: dict[tuple[Any, ...], CapturedGraph] = {}
        self.stream: torch.cuda.Stream | None = None
        self.pool: Any = None

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Tensor:
        key = tuple((x.shape, x.dtype, x.device) for x in inputs)
        captured = self.captured.pop(key, None) or self._capture(inputs)
        self.captured[key] = captured  # moves it to the end: the most recently used
        for static, x in zip(captured.inputs, inputs, strict=True):
            static.copy_(x)
        captured.graph.replay()
        return captured.output.clone()

    def forget(self) -> None:
        """Drop all captured graphs."""
        self.captured.clear()
        self.stream = None

    def _capture(self, inputs: tuple[Tensor, ...]) -> CapturedGraph:
        while len(self.captured) >= self.max_graphs:
            del self.captured[next(iter(self.captured))]
        device = inputs[0].device if inputs else torch.device("cuda", torch.cuda.current_device())
        if self.stream is None or self.stream.device != device:
            self.captured.clear()
            self.stream = torch.cuda.Stream(device)
        if not self.captured:
            self.pool = torch.cuda.graph_pool_handle()  # a pool is freed with its last graph
        static = [x.clone() for x in inputs]
        try:
            # On the stream of the other graphs, which is required to share their memory.
            graph, output = capture(lambda: self.function(*static), self.stream, self.pool)
        except CaptureError as error:
            raise InputError(f"the generator: {error}") from None
        return CapturedGraph(graph, static, output)
