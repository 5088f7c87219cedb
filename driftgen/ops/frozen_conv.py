"""Convolution with a frozen weight: the backward pass needs no input, so none is saved.

PyTorch saves the input of a convolution for the gradient of the weight, even if the weight needs none. In the
ablation recipe these inputs take 2.4 GiB.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftgen.ops.aligned_conv import ALIGNMENT, NARROW
from driftgen.ops.dispatch import DTYPES, has_kernels

__all__ = ["align", "frozen_conv", "supports_frozen_conv"]

Pair = tuple[int, int]
# Output locations of a batch for which cuDNN 9 selects a slow kernel: 342 TFLOP/s on an H200 (bfloat16, 3×3,
# 2048 channels, 512 maps of 4×4), where 256 and 640 maps run at more than 800. Two halves take 0.77 ms
# instead of 2.03 ms, 2% of the ablation recipe's step.
SLOW_LOCATIONS = 8192


def frozen_conv(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """y = weight * x without bias, in autocast's dtype if autocast is on; ∂x = weightᵀ * ∂y.

    A weight that needs a gradient gets it from PyTorch's convolution.
    """
    if not supports_frozen_conv(x, weight):
        return F.conv2d(x, weight, None, stride, padding)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    cast = weight.detach().to(dtype, memory_format=torch.channels_last)
    inputs = (*align(x.to(dtype), cast), stride, padding)
    return _FrozenConv.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


def align(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the input channels with zeros to the alignment that tensor cores need; see ``aligned_conv``."""
    missing = -x.shape[1] % ALIGNMENT
    if not missing or x.dtype not in NARROW or not x.is_cuda:
        return x, weight
    return F.pad(x, (0, 0, 0, 0, 0, missing)), F.pad(weight, (0, 0, 0, 0, 0, missing))


def supports_frozen_conv(x: Tensor, weight: Tensor) -> bool:
    """Return True outside the compiler on a device with kernels if the weight needs no gradient."""
    if torch.compiler.is_compiling() or not has_kernels(x.device):
        return False
    trained = weight.requires_grad and torch.is_grad_enabled()
    same = x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type)
    return not trained and same and x.dtype in DTYPES and x.device == weight.device


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size, ctx.stride, ctx.padding = x.shape, stride, padding
        if x.is_cuda and len(x) > 1 and _locations(x, weight, stride, padding) == SLOW_LOCATIONS:
            return torch.cat([F.conv2d(half, weight, None, stride, padding) for half in x.chunk(2)])
        return F.conv2d(x, weight, None, stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        x = grad
        if grad.shape != ctx.size:  # only the shape, dtype and memory format of the input matter
            x = torch.empty(ctx.size, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        grad_x, _, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, ctx.stride, ctx.padding, (1, 1), False, (0, 0), 1, (True, False, False)
        )
        return grad_x, None, None, None


def _locations(x: Tensor, weight: Tensor, stride: Pair, padding: Pair) -> int:
    """Output locations of the whole batch."""
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    rows, columns = ((side + 2 * pad - kernel) // step + 1 for side, kernel, step, pad in sides)
    return len(x) * rows * columns
