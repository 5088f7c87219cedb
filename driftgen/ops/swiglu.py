"""The second half of a SwiGLU layer, W₃(silu(gate) · value), as GPU kernels with gradients.

The module in PyTorch says the same, and does it wherever kernels do not run. To ``torch.compile`` every
kernel is one operator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, power_of_two

__all__ = ["swiglu_output"]

COLUMNS = 1024  # of a program, at most
ROWS = 4  # of a program, on the way forward
ROWS_BACK = 4  # under way at a time, on the way back
CHUNKS = 1024  # of rows, on the way back, if there are so many: each leaves one row of sums
LEAST_CHUNK = 16


def swiglu_output(both: Tensor, bias: Tensor, weight: Tensor, output_bias: Tensor | None = None) -> Tensor:
    """W₃(silu(gate) · value) + b₃, from gate and value side by side ``[..., 2 · width]``.

    Only ``both`` is kept for the backward pass, which makes silu(gate) · value again for the gradient of W₃.
    ``bias`` ``[2 · width]`` is what ``both`` has as a constant already (see ``linear_and_bias``): it gets the
    gradient here. b₃ gets none. Weights are rounded to the type of ``both``, sums over rows are float32.
    """
    kind = both.dtype
    constant = None if output_bias is None else output_bias.detach().to(kind)
    out: Tensor = _SwigluOutput.apply(both, bias, weight.to(kind), constant)  # type: ignore[no-untyped-call]
    return out


class _SwigluOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, bias: Tensor, weight: Tensor, output_bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(both, bias, weight)
        return F.linear(_swiglu(both), weight, output_bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        both, bias, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        by_both, hidden, sums = _swiglu_back(grad @ weight, both)
        by_weight = grad.t() @ hidden
        return by_both, sums.to(bias.dtype), by_weight.to(weight.dtype), None


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
def _swiglu_back(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Given the gradient ``[rows, width]`` of silu(gate) · value: that of ``both``, silu(gate) · value
    ``[rows, width]``, and the sums ``[2 · width]`` of the gradient over all rows, in float32.
    """
    from driftgen.ops.swiglu_triton import backward_kernel

    grad, both = grad.contiguous(), both.contiguous()
    rows, width = grad.shape
    grad_both, out = both.new_empty(both.shape), both.new_empty(rows, width)
    options = _options(width, ROWS_BACK)
    chunk = max(-(-rows // CHUNKS), LEAST_CHUNK)
    chunks = -(-rows // chunk)
    sums = both.new_empty(chunks, 2 * width, dtype=torch.float32)
    with torch.cuda.device_of(both):
        backward_kernel[(chunks, -(-width // options["BLOCK"]))](
            grad, both, grad_both, out, sums, rows, chunk, **options
        )
    return grad_both, out, sums.sum(0)


@_swiglu_back.register_fake
def _(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sums = both.new_empty(both.shape[-1], dtype=torch.float32)
    return both.new_empty(both.shape), both.new_empty(grad.shape), sums
