"""Group normalisation with what follows it in a residual network, as one operation on a GPU: its kernels, and
which maps they cover. PyTorch does the same for all others."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import has_kernels, power_of_two
from driftgen.ops.launch import Launch

__all__ = ["group_norm", "supports_group_norm"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMBERS_OF_A_WARP = 2**10
LEAST_NUMBERS = 2**10
# Channels side by side: with 16 bits a whole line of memory, half of it, and the least that is read.
LINE, PIECE, SECTOR = 64, 32, 16
# Numbers of a program that holds them in registers. More would leave room for one program only on each
# multiprocessor, which then waits for memory and computes by turns. Instead a few are read at a time, and all
# of them twice: on an H200 with 512 maps of 256 x 32 x 32, forward 0.21 instead of 0.30 ms and backward 0.33
# instead of 0.49, with a sum 0.27 instead of 0.37 and 0.46 instead of 0.94 (``benchmarks/tune.py``).
MOST_ONCE = 2**13
# Then programs of so many warps and channels, if there are programs enough, and how often their numbers, one
# load of 16 bytes for each thread and 16-bit map, are under way. With 3 of them under way forward 0.26, with
# 128 channels 0.27, with 8 warps 0.27 ms.
WARPS, MOST_CHANNELS, PROGRAMS, STAGES = 4, 256, 512, 6
NUMBERS_AT_A_TIME = 2**8  # of a warp


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, other: Tensor | None, relu: bool
) -> Tensor:
    """y = (x − m) / √(v + ε) · weight + bias, plus ``other``, no less than 0 if ``relu``; m and v are mean
    and variance over the locations and channels of each of the groups, in float32. y has the type of x.
    """
    if supports_group_norm(x, groups, weight, bias, other):
        found: Tensor = _GroupNorm.apply(x, groups, weight, bias, eps, other, relu)  # type: ignore[no-untyped-call]
        return found
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.group_norm(x.to(wide), groups, weight.to(wide), bias.to(wide), eps).to(x.dtype)
    if other is not None:
        y = y + other
    return F.relu(y) if relu else y


def supports_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, other: Tensor | None) -> bool:
    """Whether the kernels do this map: dense channels-last, a 16- or 32-bit type, groups of a power of two of
    channels, and weights that are not trained.
    """
    if torch.compiler.is_compiling() or x.dtype not in TYPES or not has_kernels(x.device):
        return False
    size, rest = divmod(x.shape[1], groups)
    trained = torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad)
    alike = other is None or (other.dtype == x.dtype and _dense(other))
    return (
        not trained
        and rest == 0
        and size == power_of_two(size)
        and x.numel() < len(x) * 2**31
        and x.numel() > 0
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
            # Where nothing was added, y > 0 is found from x again.
            kept = y if relu and other is not None else None
            ctx.save_for_backward(x, weight, bias, kept, statistics)
            ctx.launch, ctx.relu, ctx.other = launches[1], relu, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, y, statistics = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        # Without ReLU the other summand has the gradient of the sum itself.
        of_other = torch.empty_like(x) if ctx.other and ctx.relu else None
        of_x = torch.empty_like(x)
        ctx.launch(x, weight, bias, y, grad, statistics, of_x, of_other)
        return of_x, None, None, None, None, (of_other if ctx.relu else grad) if ctx.other else None, None


@functools.lru_cache(maxsize=512)
def _launches(
    shape: torch.Size, groups: int, device: torch.device, eps: float, relu: bool
) -> tuple[Launch, Launch]:
    """Of the forward pass and of the other, for maps of this shape."""
    from driftgen.ops.group_norm_triton import backward_kernel, forward_kernel

    b, c, h, w = shape
    build = _build(b, c, h * w, c // groups)
    programs = b * -(-groups // build["GROUPS"])
    return (
        Launch(forward_kernel, programs, device, eps, RELU=relu, **build),
        Launch(backward_kernel, programs, device, RELU=relu, **build),
    )


def _build(samples: int, channels: int, locations: int, size: int) -> dict[str, int]:
    """How the kernels are built for so many maps, with groups of ``size`` channels."""
    rows = power_of_two(locations)
    block = max(size, min(power_of_two(channels), max(LINE, LEAST_NUMBERS // rows)))
    while rows * block > MOST_ONCE and block > max(size, PIECE):
        block //= 2
    warps, stages = min(32, max(1, rows * block // NUMBERS_OF_A_WARP)), 1
    if rows * block > MOST_ONCE:
        block, warps, stages = max(size, min(power_of_two(channels), MOST_CHANNELS)), WARPS, STAGES
        while samples * channels < PROGRAMS * block and block > max(size, SECTOR):
            block //= 2
        rows = max(1, warps * NUMBERS_AT_A_TIME // block)
    sizes = {"C": channels, "HW": locations, "SIZE": size, "GROUPS": block // size, "ROWS": rows}
    return {**sizes, "STAGES": stages, "num_warps": warps, "num_stages": 1}
