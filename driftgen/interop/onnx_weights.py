"""Weights of an ONNX graph in fewer bits. The graph still computes in float32.

float16: a cast follows each weight. int8: w ≈ scale · q with one scale for each output channel, as in
:mod:`driftgen.support.int8_weights`; a cast and a product follow each weight. Runtimes fold them into a
constant when they load the file. DequantizeLinear would be the usual operation, but onnxruntime fuses it with
matrix products and then rounds their inputs to 8 bits too.
"""

from __future__ import annotations

from typing import Any

import torch

from driftgen.errors import InputError
from driftgen.support.int8_weights import LEAST, SCALE, quantize

__all__ = ["compress_weights"]

# Operations that read a weight, and at which input. Its output channels are the first axis but for MatMul,
# whose weight is a transposed layer. The operations of the second line take layers apart.
WEIGHT_INPUT = {
    **{"MatMul": 1, "Gemm": 1, "Conv": 1, "Gather": 0},
    **{"Split": 0, "Slice": 0, "Transpose": 0},
}


def compress_weights(model: Any, dtype: torch.dtype) -> None:
    """Store the weights of an ``onnx.ModelProto`` in float16 or int8, in place.

    Weights are the matrices, convolutions and embeddings of at least 1,024 elements. Vectors and tables of
    constants stay in float32.
    """
    from onnx import TensorProto, helper, numpy_helper

    graph = model.graph
    last_axis = _weights(graph)
    nodes: list[Any] = []
    added: list[Any] = []
    for initializer in graph.initializer:
        name = initializer.name
        if name not in last_axis or initializer.data_type != TensorProto.FLOAT:
            continue
        weight = torch.from_numpy(numpy_helper.to_array(initializer).copy())
        if weight.ndim < 2 or weight.numel() < LEAST:
            continue
        stored, single = name + ".stored", name
        if dtype == torch.float16:
            small = weight.half()
            if not small.isfinite().all():
                raise InputError(f"dtype=float16: {name} has values beyond 65504, choose float32 or int8")
        else:
            axis, single = weight.ndim - 1 if last_axis[name] else 0, name + ".steps"
            both = quantize({name: weight.movedim(axis, 0)})
            small = both[name].movedim(0, axis).contiguous()
            scale = both[name + SCALE].view([-1 if i == axis else 1 for i in range(weight.ndim)])
            added.append(numpy_helper.from_array(scale.numpy(), name + SCALE))
        initializer.CopyFrom(numpy_helper.from_array(small.numpy(), stored))
        nodes.append(helper.make_node("Cast", [stored], [single], to=TensorProto.FLOAT))
        if single != name:
            nodes.append(helper.make_node("Mul", [single, name + SCALE], [name]))
    graph.initializer.extend(added)
    rest = list(graph.node)
    del graph.node[:]
    graph.node.extend([*nodes, *rest])  # in the order of computation


def _weights(graph: Any) -> dict[str, bool]:
    """Return each name that some operation reads as a weight, with True if its channels are the last axis."""
    found: dict[str, bool] = {}
    for node in graph.node:
        place = WEIGHT_INPUT.get(node.op_type)
        if place is not None and place < len(node.input):
            transposed = node.op_type == "Gemm" and any(a.name == "transB" and a.i for a in node.attribute)
            last = node.op_type == "MatMul" or (node.op_type == "Gemm" and not transposed)
            found.setdefault(node.input[place], last)
    return found
