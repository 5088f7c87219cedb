"""SwiGLU layer W₃(silu(W₁x) · W₂x).

With gradients, Triton kernels compute silu(gate) · value where they apply: gate and value are one matrix
product, and the backward pass recomputes their product instead of saving it. PyTorch computes the same
elsewhere. Each kernel is one custom operator to ``torch.compile``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.ops.dispatch import VECTOR, has_hooks, power_of_two, supports

__all__ = ["supports_swiglu", "swiglu"]

COLUMNS = 1024  # per program, at most
ROWS = 4  # per program in the forward pass
BACKWARD_ROWS = 4  # per iteration in the backward pass
CHUNKS = 1024  # of rows in the backward pass, if there are enough rows: each stores one row of sums
MIN_CHUNK = 16


def swiglu(x: Tensor, gate: nn.Module, value: nn.Module, output: nn.Module) -> Tensor:
    """output(silu(gate(x)) · value(x)), with the three layers of a SwiGLU."""
    layers = gate, value, output
    if supports_swiglu(x, *layers):
        return _fused_swiglu(x, *layers)  # type: ignore[arg-type]
    out: Tensor = output(F.silu(gate(x)) * value(x))
    return out


def supports_swiglu(x: Tensor, *layers: nn.Module) -> bool:
    """Return True if the kernels apply: in grad mode, for plain linear layers with biases and without hooks.

    Without gradients compiled PyTorch is as fast.
    """
    return (
        torch.is_grad_enabled()
        and supports(x)
        and all(type(layer) is nn.Linear and layer.bias is not None for layer in layers)
        and not has_hooks(*layers)
    )


def _fused_swiglu(x: Tensor, gate: nn.Linear, value: nn.Linear, output: nn.Linear) -> Tensor:
    bias = torch.cat([gate.bias, value.bias])
    # The backward kernel sums the gradient of ``both``, so the bias gets its gradient there.
    both = F.linear(x, torch.cat([gate.weight, value.weight]), bias.detach())
    return swiglu_output(both, bias, output.weight, output.bias)


def swiglu_output(both: Tensor, bias: Tensor, weight: Tensor, output_bias: Tensor) -> Tensor:
    """W₃(silu(gate) · value) + b₃ from gate and value side by side ``[..., 2 · width]``.

    Only ``both`` is saved for the backward pass. It includes ``bias`` ``[2 · width]``, detached, whose
    gradient this function computes. The weight is rounded to the dtype of ``both``; sums over rows are
    float32.
    """
    inputs = both, bias, weight.to(both.dtype), output_bias
    return _SwigluOutput.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


class _SwigluOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, bias: Tensor, weight: Tensor, output_bias: Tensor) -> Tensor:
        ctx.save_for_backward(both, weight)
        ctx.bias_dtype, ctx.output_bias_dtype = bias.dtype, output_bias.dtype
        return F.linear(_swiglu(both), weight, output_bias.to(both.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        both, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        grad_both, hidden, sums = _swiglu_backward(grad @ weight, both)
        grad_weight = grad.t() @ hidden
        grad_output_bias = grad.sum(0, dtype=torch.float32).to(ctx.output_bias_dtype)
        return grad_both, sums.to(ctx.bias_dtype), grad_weight.to(weight.dtype), grad_output_bias


def _options(width: int, rows: int) -> dict[str, int]:
    block = min(power_of_two(width), COLUMNS)
    warps = min(max(block // (32 * VECTOR), 1), 4)
    return {"WIDTH": width, "BLOCK": block, "ROWS": rows, "num_warps": warps}


@torch.library.custom_op("driftgen::swiglu", mutates_args=())
def _swiglu(both: Tensor) -> Tensor:
    """silu(gate) · value, rounded once."""
    from driftgen.ops.swiglu_triton import forward_kernel

    both = both.contiguous()
    width = both.shape[-1] // 2
    out = both.new_empty(*both.shape[:-1], width)
    rows, options = both.numel() // (2 * width), _options(width, ROWS)
    with torch.cuda.device_of(both):
        forward_kernel[(-(-rows // ROWS), -(-width // options["BLOCK"]))](both, out, rows, **options)
    return out


@_swiglu.register_fake
def _(both: Tensor) -> Tensor:
    return both.new_empty(*both.shape[:-1], both.shape[-1] // 2)


@torch.library.custom_op("driftgen::swiglu_backward", mutates_args=())
def _swiglu_backward(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient ``[rows, width]`` of silu(gate) · value, return the gradient of ``both``, the product
    silu(gate) · value ``[rows, width]``, and the sums of the gradient over rows, ``[2 · width]`` in float32.
    """
    from driftgen.ops.swiglu_triton import backward_kernel

    grad, both = grad.contiguous(), both.contiguous()
    rows, width = grad.shape
    grad_both, out = both.new_empty(both.shape), both.new_empty(rows, width)
    options = _options(width, BACKWARD_ROWS)
    chunk = max(-(-rows // CHUNKS), MIN_CHUNK)
    chunks = -(-rows // chunk)
    sums = both.new_empty(chunks, 2 * width, dtype=torch.float32)
    with torch.cuda.device_of(both):
        backward_kernel[(chunks, -(-width // options["BLOCK"]))](
            grad, both, grad_both, out, sums, rows, chunk, **options
        )
    return grad_both, out, sums.sum(0)


@_swiglu_backward.register_fake
def _(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sums = both.new_empty(both.shape[-1], dtype=torch.float32)
    return both.new_empty(both.shape), both.new_empty(grad.shape), sums
