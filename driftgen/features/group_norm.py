"""Group normalisation with what follows it in a residual network, as one operation on a GPU: its kernels, and
which maps they cover. PyTorch does the same for all others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from driftgen.devices import has_kernels

__all__ = ["covers", "group_norm"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_NUMBERS = 2**15  # of a program, which holds them in registers
NUMBERS_OF_A_WARP = 2**11
WIDE = 32  # channels side by side from which on memory is read in whole pieces


def group_norm(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, other: Tensor | None, relu: bool
) -> Tensor:
    """y = (x − m) / √(v + ε) · weight + bias, plus ``other``, no less than 0 if ``relu``; m and v are mean
    and variance over the locations and channels of each of the groups, in float32. y has the type of x.
    """
    if covers(x, groups, weight, bias, other):
        apply = cast(Callable[..., Tensor], _GroupNorm.apply)
        return apply(x, groups, weight, bias, eps, other, relu)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.group_norm(x.to(wide), groups, weight.to(wide), bias.to(wide), eps).to(x.dtype)
    if other is not None:
        y = y + other
    return F.relu(y) if relu else y


def covers(x: Tensor, groups: int, weight: Tensor, bias: Tensor, other: Tensor | None) -> bool:
    """Whether the kernels do this map: dense channels-last, a 16- or 32-bit type, groups of a power of two of
    channels with at most 32,768 numbers each, and weights that are not trained.
    """
    if torch.compiler.is_compiling() or x.dtype not in TYPES or not has_kernels(x.device):
        return False
    size, rest = divmod(x.shape[1], groups)
    trained = torch.is_grad_enabled() and (weight.requires_grad or bias.requires_grad)
    alike = other is None or (other.dtype == x.dtype and _dense(other))
    locations = _power(x.shape[2] * x.shape[3])
    return (
        not trained
        and rest == 0
        and size == _power(size)
        and locations * size <= MOST_NUMBERS
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
        from driftgen.features.group_norm_kernels import forward_kernel

        b, c, h, w = x.shape
        grid, options = _build(c, h * w, c // groups)
        y = torch.empty_like(x)
        needed = ctx.needs_input_grad[0] or ctx.needs_input_grad[5]
        statistics = torch.empty(b, 2, c, device=x.device) if needed else None
        with _on(x.device):
            forward_kernel[(b, grid)](x, weight, bias, other, y, statistics, eps, relu, **options)
        if needed:
            ctx.save_for_backward(x, weight, y if relu else None, statistics)
            ctx.build = b, grid, options
            ctx.relu, ctx.other = relu, other is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from driftgen.features.group_norm_kernels import backward_kernel

        x, weight, y, statistics = ctx.saved_tensors
        b, grid, options = ctx.build
        grad = grad.contiguous(memory_format=torch.channels_last)
        # Without ReLU the other summand has the gradient of the sum itself.
        of_other = torch.empty_like(x) if ctx.other and ctx.relu else None
        of_x = torch.empty_like(x)
        with _on(x.device):
            backward_kernel[(b, grid)](x, weight, y, grad, statistics, of_x, of_other, ctx.relu, **options)
        return of_x, None, None, None, None, (of_other if ctx.relu else grad) if ctx.other else None, None


@functools.lru_cache(maxsize=256)
def _build(channels: int, locations: int, size: int) -> tuple[int, dict[str, Any]]:
    """Programs of a sample, and how the kernels are built."""
    rows = _power(locations)
    block = max(size, min(_power(channels), max(WIDE, 2**14 // rows)))
    while rows * block > MOST_NUMBERS:
        block //= 2
    warps = min(16, max(1, rows * block // NUMBERS_OF_A_WARP))
    shape = {"C": channels, "HW": locations, "SIZE": size, "BHW": rows, "BC": block}
    return -(-channels // block), {**shape, "num_warps": warps, "num_stages": 1}


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (n - 1).bit_length()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
