"""Group norm with frozen weights, an optional addition and ReLU, as in the residual blocks of an encoder.

Triton kernels compute it where they apply, see :func:`supports_group_norm`, and PyTorch elsewhere.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import DTYPES, has_kernels, power_of_two
from driftgen.ops.launch import Launch

__all__ = ["group_norm", "supports_group_norm"]

ELEMENTS_PER_WARP = 2**10
MIN_ELEMENTS = 2**10  # of a program
# A program holds all locations of its groups in registers. It takes fewer channels until it has at most this
# many elements, so that several programs fit a multiprocessor, or until its channels are a 64-byte piece of
# 16-bit memory; large maps take half of that.
MAX_ELEMENTS = 2**13
MAX_RESIDENT = 2**16  # elements of a program that still fit its registers
# Adjacent channels: with 16 bits a whole cache line, half of one, and the least that memory transfers.
LINE, PIECE, SECTOR = 64, 32, 16


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, other: Tensor | None, relu: bool
) -> Tensor:
    """y = (x − m) / √(v + ε) · weight + bias, plus ``other``, with ReLU if ``relu``.

    m and v are mean and variance over the locations and channels of each group, in float32. y has the dtype
    of x.
    """
    if supports_group_norm(x, groups, weight, bias, other):
        inputs = x, groups, weight, bias, eps, other, relu
        return _GroupNorm.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.group_norm(x.to(wide), groups, weight.to(wide), bias.to(wide), eps).to(x.dtype)
    if other is not None:
        y = y + other
    return F.relu(y) if relu else y


def supports_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, other: Tensor | None) -> bool:
    """Return True if the kernels take this map.

    It must be dense in channels-last memory format, of a 16- or 32-bit dtype, with groups of a power of two
    of channels that fit the registers, and with weights that need no gradient.
    """
    if torch.compiler.is_compiling() or x.dtype not in DTYPES or not has_kernels(x.device):
        return False
    size, rest = divmod(x.shape[1], groups)
    trained = torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad)
    alike = other is None or (other.dtype == x.dtype and _dense(other))
    return (
        not trained
        and rest == 0
        and size == power_of_two(size)
        and x.numel() > 0
        and power_of_two(x.shape[2] * x.shape[3]) * max(size, SECTOR) <= MAX_RESIDENT
        and _dense(x)
        and alike
    )


def _dense(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        groups: int,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        other: Tensor | None,
        relu: bool,
    ) -> Tensor:
        launches = _launches(x.shape, groups, x.device, eps, relu)
        y = torch.empty_like(x)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[5]
        statistics = x.new_empty((len(x), 2, groups), dtype=torch.float32) if needed else None
        launches[0](x, weight, bias, other, y, statistics)
        if needed:
            # Without an addition, the backward kernel recomputes y > 0 from x.
            output = y if relu and other is not None else None
            ctx.save_for_backward(x, weight, bias, output, statistics)
            ctx.launch, ctx.relu, ctx.other = launches[1], relu, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, y, statistics = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        # Without ReLU the gradient of ``other`` is that of the sum.
        grad_other = torch.empty_like(x) if ctx.other and ctx.relu else None
        grad_x = torch.empty_like(x)
        ctx.launch(x, weight, bias, y, grad, statistics, grad_x, grad_other)
        return grad_x, None, None, None, None, (grad_other if ctx.relu else grad) if ctx.other else None, None


@functools.lru_cache(maxsize=512)
def _launches(
    shape: torch.Size, groups: int, device: torch.device, eps: float, relu: bool
) -> tuple[Launch, Launch]:
    """Return the forward and backward launch for maps of this shape."""
    from driftgen.ops.group_norm_triton import backward_kernel, forward_kernel

    b, c, h, w = shape
    options = _launch_options(c, h * w, c // groups)
    programs = b * -(-groups // options["GROUPS"])
    return (
        Launch(forward_kernel, programs, device, eps, RELU=relu, **options),
        Launch(backward_kernel, programs, device, RELU=relu, **options),
    )


def _launch_options(channels: int, locations: int, size: int) -> dict[str, int]:
    """Return the launch options for maps with groups of ``size`` channels."""
    rows = power_of_two(locations)
    block = max(size, min(power_of_two(channels), max(LINE, MIN_ELEMENTS // rows)))
    while rows * block > MAX_ELEMENTS and block > max(size, PIECE):
        block //= 2
    while rows * block > 2 * MAX_ELEMENTS and block > max(size, SECTOR):
        block //= 2
    warps = min(32, max(1, rows * block // ELEMENTS_PER_WARP))
    sizes = {"C": channels, "HW": locations, "SIZE": size, "GROUPS": block // size, "ROWS": rows}
    return {**sizes, "num_warps": warps, "num_stages": 1}
