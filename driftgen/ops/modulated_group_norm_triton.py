# mypy: ignore-errors
"""The kernels of ``driftgen.ops.modulated_group_norm``.

A program handles one sample, ROWS locations with all their channels at a time, with STAGES loads in flight.
It reads the map twice: for the statistics, and for the result. Groups may have any size: sums are taken per
channel and combined per group at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _offsets(first, channel, C: tl.constexpr, HW: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of ROWS locations, ``[ROWS, BC]``, their mask, and the mask of the locations."""
    row = first + tl.arange(0, ROWS)
    inside = (row < HW)[:, None] & (channel < C)[None, :]
    return row[:, None] * C + channel[None, :], inside, row < HW


@triton.jit
def _read(tensor, at, inside):
    return tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _modulation(part, channel, C: tl.constexpr, DTYPE: tl.constexpr):
    """Load scale or shift of a sample, ``[BC]``, rounded to the dtype of the map."""
    return tl.load(part + channel, mask=channel < C, other=0.0).to(DTYPE).to(tl.float32)


@triton.jit
def _group_mean(channel_sum, group, NUMBERS: tl.constexpr, BG: tl.constexpr):
    """Return the mean of each group, from sums per channel, broadcast to the channels of the group."""
    member = group[:, None] == tl.arange(0, BG)[None, :]
    total = tl.sum(tl.where(member, channel_sum[:, None], 0.0), axis=0)
    return tl.sum(tl.where(member, total[None, :], 0.0), axis=1) * (1.0 / NUMBERS)


@triton.jit
def forward_kernel(
    x, scale, shift, y, statistics, scale_stride, shift_stride, epsilon,
    C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = silu(z), z = (x − m) / √(v + ε) · (1 + scale) + shift, with m and v over the locations and the SIZE
    channels of each group. Stores m and 1 / √(v + ε) to ``statistics`` ``[B, 2, groups]``.

    Each of ROWS rows keeps a running mean and sum of squared differences from it, so that a mean far from
    zero costs no precision.
    """
    GROUPS: tl.constexpr = C // SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BC)
    group = channel // SIZE
    x += sample * (HW * C)
    y += sample * (HW * C)
    count = tl.zeros((ROWS,), tl.float32)
    means = tl.zeros((ROWS, BC), tl.float32)
    squares = tl.zeros((ROWS, BC), tl.float32)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, valid = _offsets(first, channel, C, HW, ROWS)
        value = _read(x, at, inside)
        count += tl.where(valid, 1.0, 0.0)
        difference = tl.where(inside, value - means, 0.0)
        means += difference / tl.maximum(count, 1.0)[:, None]  # rows beyond the last location have none
        squares += difference * (value - means)
    mean = _group_mean(tl.sum(means * count[:, None], axis=0), group, HW * SIZE, BG)
    difference = tl.where((channel < C)[None, :], means - mean[None, :], 0.0)
    squares = tl.sum(squares + difference * difference * count[:, None], axis=0)
    inverse = tl.rsqrt(_group_mean(squares, group, HW * SIZE, BG) + epsilon)
    place = statistics + sample * (2 * GROUPS) + group
    first_of_group = (channel < C) & (channel % SIZE == 0)
    tl.store(place, mean, mask=first_of_group)
    tl.store(place + GROUPS, inverse, mask=first_of_group)
    factor = inverse * (1.0 + _modulation(scale + sample * scale_stride, channel, C, dtype))
    offset = _modulation(shift + sample * shift_stride, channel, C, dtype)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, _ = _offsets(first, channel, C, HW, ROWS)
        z = (_read(x, at, inside) - mean[None, :]) * factor[None, :] + offset[None, :]
        tl.store(y + at, (z * tl.sigmoid(z)).to(dtype), mask=inside)


@triton.jit
def _z_gradient(x, grad, at, inside, mean, inverse, factor, offset):
    """Return the gradient of z, and x̂ = (x − m) / √(v + ε)."""
    normed = (_read(x, at, inside) - mean[None, :]) * inverse[None, :]
    z = normed * factor[None, :] + offset[None, :]
    s = tl.sigmoid(z)
    return _read(grad, at, inside) * (s * (1.0 + z * (1.0 - s))), normed


@triton.jit
def backward_kernel(
    x, scale, shift, grad, statistics, grad_x, sums, scale_stride, shift_stride,
    C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With g the gradient of z and w = 1 + scale: ∂x = (g w − mean(g w) − x̂ mean(g w x̂)) / √(v + ε), with
    means over each group. Stores Σ g x̂ and Σ g over the locations, the gradients of scale and shift, to
    ``sums`` ``[B, 2, C]``.
    """
    GROUPS: tl.constexpr = C // SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BC)
    group = channel // SIZE
    valid = channel < C
    x += sample * (HW * C)
    grad += sample * (HW * C)
    grad_x += sample * (HW * C)
    place = statistics + sample * (2 * GROUPS) + group
    mean = tl.load(place, mask=valid, other=0.0)
    inverse = tl.load(place + GROUPS, mask=valid, other=0.0)
    factor = 1.0 + _modulation(scale + sample * scale_stride, channel, C, dtype)
    offset = _modulation(shift + sample * shift_stride, channel, C, dtype)
    g_sum = tl.zeros((ROWS, BC), tl.float32)
    gx_sum = tl.zeros((ROWS, BC), tl.float32)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, _ = _offsets(first, channel, C, HW, ROWS)
        g, normed = _z_gradient(x, grad, at, inside, mean, inverse, factor, offset)
        g_sum += g
        gx_sum += g * normed
    shift_sum, scale_sum = tl.sum(g_sum, axis=0), tl.sum(gx_sum, axis=0)
    sums += sample * (2 * C) + channel
    tl.store(sums, scale_sum, mask=valid)
    tl.store(sums + C, shift_sum, mask=valid)
    mean_g = _group_mean(factor * shift_sum, group, HW * SIZE, BG)
    mean_gx = _group_mean(factor * scale_sum, group, HW * SIZE, BG)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, _ = _offsets(first, channel, C, HW, ROWS)
        g, normed = _z_gradient(x, grad, at, inside, mean, inverse, factor, offset)
        d = inverse[None, :] * (g * factor[None, :] - mean_g[None, :] - normed * mean_gx[None, :])
        tl.store(grad_x + at, d.to(dtype), mask=inside)
