"""Group norm with modulation and SiLU, for the residual blocks of a U-Net.

Triton kernels with gradients compute it where they apply, see :func:`supports_modulated_group_norm`, and
PyTorch elsewhere. Each kernel is one custom operator to ``torch.compile``, which would otherwise generate and
tune about thirty kernels for each width of a U-Net.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, power_of_two, supports, unit_stride
from driftgen.ops.norms import EPSILON

__all__ = ["modulated_group_norm", "supports_modulated_group_norm"]

MAX_CHANNELS = 2048
WARPS = 4
STAGES = 4  # loads in flight


def supports_modulated_group_norm(x: Tensor, groups: int) -> bool:
    """Return True if the kernels take x ``[B, C, H, W]``: dense in channels-last memory format, with
    C ≤ 2048 divisible by ``groups``.
    """
    return (
        supports(x)
        and x.ndim == 4
        and x.shape[1] <= MAX_CHANNELS
        and x.shape[1] % groups == 0
        and x.shape[1] * x.shape[2] * x.shape[3] < 2**31
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def modulated_group_norm(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> Tensor:
    """silu((x − m) / √(v + 1e-6) · (1 + scale) + shift), with m and v over the locations and channels of each
    group, in float32. Scale and shift are ``[B, C]`` in any dtype and are rounded to that of x.
    """
    if supports_modulated_group_norm(x, groups):
        return _ModulatedGroupNorm.apply(x, groups, scale, shift)  # type: ignore[no-any-return, no-untyped-call]
    scale, shift = (part.to(x.dtype)[:, :, None, None] for part in (scale, shift))
    normed = F.group_norm(x.float(), groups, eps=EPSILON).to(x.dtype)
    return F.silu(normed * (1 + scale) + shift)


class _ModulatedGroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> Tensor:
        y: Tensor
        y, statistics = _norm(x, groups, scale, shift)
        ctx.save_for_backward(x, scale, shift, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, statistics = ctx.saved_tensors
        grad_x, sums = _norm_backward(grad, x, scale, shift, statistics)
        return grad_x, None, sums[:, 0].to(scale.dtype), sums[:, 1].to(shift.dtype)


def _options(x: Tensor, groups: int) -> dict[str, int]:
    _, channels, height, width = x.shape
    block = power_of_two(channels)
    rows = max(1, min(WARPS * 32 * VECTOR // block, power_of_two(height * width)))
    sizes = {"C": channels, "HW": height * width, "SIZE": channels // groups, "BC": block}
    return {**sizes, "BG": power_of_two(groups), "ROWS": rows, "STAGES": STAGES, "num_warps": WARPS}


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("driftgen::modulated_group_norm", mutates_args=())
def _norm(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result, and m and 1 / √(v + 1e-6) of each group, ``[B, 2, groups]``."""
    from driftgen.ops.modulated_group_norm_triton import forward_kernel

    x, scale, shift = _channels_last(x), unit_stride(scale), unit_stride(shift)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    statistics = x.new_empty(len(x), 2, groups, dtype=torch.float32)
    with torch.cuda.device_of(x):
        forward_kernel[(len(x),)](
            x, scale, shift, y, statistics, scale.stride(0), shift.stride(0), EPSILON, **_options(x, groups)
        )
    return y, statistics


@_norm.register_fake
def _(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], 2, groups, dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), statistics


@torch.library.custom_op("driftgen::modulated_group_norm_backward", mutates_args=())
def _norm_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and, in float32, of scale and shift, ``[B, 2, C]``."""
    from driftgen.ops.modulated_group_norm_triton import backward_kernel

    grad, x, scale, shift = _channels_last(grad), _channels_last(x), unit_stride(scale), unit_stride(shift)
    grad_x = torch.empty_like(x, memory_format=torch.channels_last)
    sums = x.new_empty(len(x), 2, x.shape[1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        backward_kernel[(len(x),)](
            x, scale, shift, grad, statistics.contiguous(), grad_x, sums, scale.stride(0), shift.stride(0),
            **_options(x, statistics.shape[2]),
        )  # fmt: skip
    return grad_x, sums


@_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    sums = x.new_empty(x.shape[0], 2, x.shape[1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), sums
