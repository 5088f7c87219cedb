"""1-D convolution of short sequences: cuDNN on a GPU, matrix products on a CPU.

On a CPU, oneDNN needs about ten times as long for the backward pass of a chunk of 16 steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import is_tracing

__all__ = ["Conv1d", "conv1d"]


def conv1d(x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    """Convolve ``[B, C, T]`` with weights ``[O, C, k]``; the same as ``F.conv1d`` up to rounding."""
    plain = x.device.type != "cpu" or torch.is_autocast_enabled("cpu") or is_tracing()
    if plain or x.dtype != weight.dtype:
        return F.conv1d(x, weight, bias, stride, padding)
    out: Tensor = _MatrixConv.apply(x, weight, bias, stride, padding)  # type: ignore[no-untyped-call]
    return out


class Conv1d(nn.Conv1d):
    """``nn.Conv1d`` with a bias, one stride and padding, computed by :func:`conv1d`."""

    def forward(self, input: Tensor) -> Tensor:  # the name of nn.Conv1d
        assert self.bias is not None
        return conv1d(input, self.weight, self.bias, self.stride[0], int(self.padding[0]))


class _MatrixConv(torch.autograd.Function):
    """Columns ``[B · T', k · C]`` times weights. Results and gradients are contiguous: on strided ones,
    activations take their slow path.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int) -> Tensor:
        size, batch = weight.shape[2], len(x)
        padded = F.pad(x.transpose(1, 2), (0, 0, padding, padding))
        count = (padded.shape[1] - size) // stride + 1
        last = (count - 1) * stride + 1
        columns = torch.cat([padded[:, i : i + last : stride] for i in range(size)], dim=2).flatten(0, 1)
        ctx.save_for_backward(columns, weight)
        ctx.sizes = batch, count, last, stride, padding, x.shape[2]
        out = torch.addmm(bias, columns, _matrix(weight).t())
        result: Tensor = out.unflatten(0, (batch, count)).transpose(1, 2).contiguous()
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns, weight = ctx.saved_tensors
        batch, count, last, stride, padding, length = ctx.sizes
        out, channels, size = weight.shape
        rows = gradient.transpose(1, 2).reshape(-1, out)
        by_weight = (rows.t() @ columns).unflatten(1, (size, channels)).transpose(1, 2).contiguous()
        by_input = None
        if ctx.needs_input_grad[0]:
            parts = (rows @ _matrix(weight)).view(batch, count, size, channels)
            padded = rows.new_zeros(batch, length + 2 * padding, channels)
            for i in range(size):
                padded[:, i : i + last : stride] += parts[:, :, i]
            by_input = padded[:, padding : padding + length].transpose(1, 2).contiguous()
        return by_input, by_weight, rows.sum(0), None, None


def _matrix(weight: Tensor) -> Tensor:
    """Return weights ``[O, C, k]`` as ``[O, k · C]``."""
    return weight.transpose(1, 2).flatten(1)
