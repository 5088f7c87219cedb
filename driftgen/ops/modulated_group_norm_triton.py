# mypy: ignore-errors
"""A norm over groups of a map's channels with its modulation and SiLU, one GPU kernel each way.

A program has one sample, ROWS of its locations at a time with all their channels, while those that follow are
being read (STAGES: how often ROWS are under way). Maps are read twice: for the sums, and for the result.
Groups may be of any size: sums of channels become those of groups at the end.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _place(first, channel, C: tl.constexpr, HW: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of the numbers of ROWS locations, ``[ROWS, BC]``, which of them exist, and which locations."""
    row = first + tl.arange(0, ROWS)
    inside = (row < HW)[:, None] & (channel < C)[None, :]
    return row[:, None] * C + channel[None, :], inside, row < HW


@triton.jit
def _read(tensor, at, inside):
    return tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _modulation(part, channel, C: tl.constexpr, DTYPE: tl.constexpr):
    """Scale or shift of a sample, ``[BC]``, rounded as the map is."""
    return tl.load(part + channel, mask=channel < C, other=0.0).to(DTYPE).to(tl.float32)


@triton.jit
def _mean_of_group(of_channel, group, NUMBERS: tl.constexpr, BG: tl.constexpr):
    """The sum over the channels of each group divided by its numbers, given to each of its channels."""
    member = group[:, None] == tl.arange(0, BG)[None, :]
    total = tl.sum(tl.where(member, of_channel[:, None], 0.0), axis=0)
    return tl.sum(tl.where(member, total[None, :], 0.0), axis=1) * (1.0 / NUMBERS)


@triton.jit
def forward_kernel(
    x, scale, shift, y, statistics, scale_by_sample, shift_by_sample, epsilon,
    C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = silu(z), z = (x − m) / √(v + ε) · (1 + scale) + shift, with m and v over the locations and the SIZE
    channels of each group; ``statistics``, ``[B, 2, groups]``, takes m and 1 / √(v + ε).

    Every ROWS-th location of a channel has a mean and a sum of squares about it of its own, to which the next
    is joined, so that no digits are lost to a mean far from zero.
    """
    GROUPS: tl.constexpr = C // SIZE
    kind: tl.constexpr = x.dtype.element_ty
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BC)
    group = channel // SIZE
    x += sample * (HW * C)
    y += sample * (HW * C)
    count = tl.zeros((ROWS,), tl.float32)
    means = tl.zeros((ROWS, BC), tl.float32)
    squares = tl.zeros((ROWS, BC), tl.float32)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, here = _place(first, channel, C, HW, ROWS)
        value = _read(x, at, inside)
        count += tl.where(here, 1.0, 0.0)
        away = tl.where(inside, value - means, 0.0)
        means += away / tl.maximum(count, 1.0)[:, None]  # some have no location at all
        squares += away * (value - means)
    mean = _mean_of_group(tl.sum(means * count[:, None], axis=0), group, HW * SIZE, BG)
    away = tl.where((channel < C)[None, :], means - mean[None, :], 0.0)
    squares = tl.sum(squares + away * away * count[:, None], axis=0)
    inverse = tl.rsqrt(_mean_of_group(squares, group, HW * SIZE, BG) + epsilon)
    place = statistics + sample * (2 * GROUPS) + group
    first_of_group = (channel < C) & (channel % SIZE == 0)
    tl.store(place, mean, mask=first_of_group)
    tl.store(place + GROUPS, inverse, mask=first_of_group)
    factor = inverse * (1.0 + _modulation(scale + sample * scale_by_sample, channel, C, kind))
    offset = _modulation(shift + sample * shift_by_sample, channel, C, kind)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, _ = _place(first, channel, C, HW, ROWS)
        z = (_read(x, at, inside) - mean[None, :]) * factor[None, :] + offset[None, :]
        tl.store(y + at, (z * tl.sigmoid(z)).to(kind), mask=inside)


@triton.jit
def _given(x, grad, at, inside, mean, inverse, factor, offset):
    """The gradient of z, and x̂ = (x − m) / √(v + ε)."""
    normed = (_read(x, at, inside) - mean[None, :]) * inverse[None, :]
    z = normed * factor[None, :] + offset[None, :]
    s = tl.sigmoid(z)
    return _read(grad, at, inside) * (s * (1.0 + z * (1.0 - s))), normed


@triton.jit
def backward_kernel(
    x, scale, shift, grad, statistics, grad_x, sums, scale_by_sample, shift_by_sample,
    C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With g the gradient of z and w = 1 + scale: ∂x = (g w − mean(g w) − x̂ mean(g w x̂)) / √(v + ε), means
    over each group; ``sums``, ``[B, 2, C]``, takes Σ g x̂ and Σ g over the locations, the gradients of scale
    and shift.
    """
    GROUPS: tl.constexpr = C // SIZE
    kind: tl.constexpr = x.dtype.element_ty
    sample = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BC)
    group = channel // SIZE
    there = channel < C
    x += sample * (HW * C)
    grad += sample * (HW * C)
    grad_x += sample * (HW * C)
    place = statistics + sample * (2 * GROUPS) + group
    mean = tl.load(place, mask=there, other=0.0)
    inverse = tl.load(place + GROUPS, mask=there, other=0.0)
    factor = 1.0 + _modulation(scale + sample * scale_by_sample, channel, C, kind)
    offset = _modulation(shift + sample * shift_by_sample, channel, C, kind)
    plain = tl.zeros((ROWS, BC), tl.float32)
    product = tl.zeros((ROWS, BC), tl.float32)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, _ = _place(first, channel, C, HW, ROWS)
        g, normed = _given(x, grad, at, inside, mean, inverse, factor, offset)
        plain += g
        product += g * normed
    of_shift, of_scale = tl.sum(plain, axis=0), tl.sum(product, axis=0)
    sums += sample * (2 * C) + channel
    tl.store(sums, of_scale, mask=there)
    tl.store(sums + C, of_shift, mask=there)
    average = _mean_of_group(factor * of_shift, group, HW * SIZE, BG)
    along = _mean_of_group(factor * of_scale, group, HW * SIZE, BG)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        at, inside, _ = _place(first, channel, C, HW, ROWS)
        g, normed = _given(x, grad, at, inside, mean, inverse, factor, offset)
        d = inverse[None, :] * (g * factor[None, :] - average[None, :] - normed * along[None, :])
        tl.store(grad_x + at, d.to(kind), mask=inside)
