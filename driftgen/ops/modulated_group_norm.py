"""A norm over groups of a map's channels with its modulation and SiLU, as GPU kernels with gradients.

Plain PyTorch modules compute the same where these kernels do not apply;
``supports_modulated_group_norm`` decides.
To ``torch.compile`` each kernel is one operator, where the compiler would make, and try, some
thirty for each width of a U-Net.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, contiguous_rows, power_of_two, supports

__all__ = ["modulated_group_norm", "supports_modulated_group_norm"]

MOST_CHANNELS = 2048
WARPS = 4
STAGES = 4  # how often the numbers that the threads of a program have at a time are under way
EPS = 1e-6


def supports_modulated_group_norm(x: Tensor, groups: int) -> bool:
    """Return True for maps ``[B, C, H, W]`` that are dense channels-last, with C up to 2048 and a multiple of
    the groups.
    """
    return (
        supports(x)
        and x.ndim == 4
        and x.shape[1] <= MOST_CHANNELS
        and x.shape[1] % groups == 0
        and x.shape[1] * x.shape[2] * x.shape[3] < 2**31
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def modulated_group_norm(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> Tensor:
    """silu((x − m) / √(v + 1e-6) · (1 + scale) + shift), with m and v over the locations and channels of each
    group. Scale and shift are ``[B, C]``, in any type, and rounded to that of x.
    """
    y: Tensor = _MapNorm.apply(x, groups, scale, shift)  # type: ignore[no-untyped-call]
    return y


class _MapNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> Tensor:
        y: Tensor
        y, statistics = _norm(x, groups, scale, shift)
        ctx.save_for_backward(x, scale, shift, statistics)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, statistics = ctx.saved_tensors
        by_x, sums = _norm_back(grad, x, scale, shift, statistics)
        return by_x, None, sums[:, 0].to(scale.dtype), sums[:, 1].to(shift.dtype)


def _options(x: Tensor, groups: int) -> dict[str, int]:
    _, channels, height, width = x.shape
    block = power_of_two(channels)
    rows = max(1, min(WARPS * 32 * VECTOR // block, power_of_two(height * width)))
    sizes = {"C": channels, "HW": height * width, "SIZE": channels // groups, "BC": block}
    return {**sizes, "BG": power_of_two(groups), "ROWS": rows, "STAGES": STAGES, "num_warps": WARPS}


def _map(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("driftgen::modulated_group_norm", mutates_args=())
def _norm(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and m and 1 / √(v + 1e-6) of each group, ``[B, 2, groups]``."""
    from driftgen.ops.modulated_group_norm_triton import forward_kernel

    x, scale, shift = _map(x), contiguous_rows(scale), contiguous_rows(shift)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    statistics = x.new_empty(len(x), 2, groups, dtype=torch.float32)
    with torch.cuda.device_of(x):
        forward_kernel[(len(x),)](
            x, scale, shift, y, statistics, scale.stride(0), shift.stride(0), EPS, **_options(x, groups)
        )
    return y, statistics


@_norm.register_fake
def _(x: Tensor, groups: int, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], 2, groups, dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), statistics


@torch.library.custom_op("driftgen::modulated_group_norm_backward", mutates_args=())
def _norm_back(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, statistics: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of scale and shift, ``[B, 2, C]``, in float32."""
    from driftgen.ops.modulated_group_norm_triton import backward_kernel

    grad, x, scale, shift = _map(grad), _map(x), contiguous_rows(scale), contiguous_rows(shift)
    grad_x = torch.empty_like(x, memory_format=torch.channels_last)
    sums = x.new_empty(len(x), 2, x.shape[1], dtype=torch.float32)
    with torch.cuda.device_of(x):
        backward_kernel[(len(x),)](
            x, scale, shift, grad, statistics.contiguous(), grad_x, sums, scale.stride(0), shift.stride(0),
            **_options(x, statistics.shape[2]),
        )  # fmt: skip
    return grad_x, sums


@_norm_back.register_fake
def _(grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, statistics: Tensor) -> tuple[Tensor, Tensor]:
    sums = x.new_empty(x.shape[0], 2, x.shape[1], dtype=torch.float32)
    return torch.empty_like(x, memory_format=torch.channels_last), sums
