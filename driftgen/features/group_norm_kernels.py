"""The kernels of ``driftgen.features.group_norm``: a program holds all locations of some groups of a sample,
so that a map is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _place(C: tl.constexpr, HW: tl.constexpr, BHW: tl.constexpr, BC: tl.constexpr):
    """Offsets of this program's numbers ``[BHW, BC]``, which of them exist, and its channels."""
    sample, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    location, channel = tl.arange(0, BHW), block * BC + tl.arange(0, BC)
    offsets = sample * (HW * C) + (location[:, None] * C + channel[None, :])
    return offsets, (location < HW)[:, None] & (channel < C)[None, :], channel


@triton.jit
def _read(pointer, offsets, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + offsets)
    else:  # what follows an if is compiled in any case
        return tl.load(pointer + offsets, mask=inside, other=0.0)


@triton.jit
def _write(pointer, offsets, values, inside, EVEN: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=inside)


@triton.jit
def _group_mean(values, HW: tl.constexpr, SIZE: tl.constexpr, BC: tl.constexpr):
    """The mean over locations and the channels of a group, ``[BC]``: for each channel that of its group."""
    by_group = tl.sum(tl.reshape(tl.sum(values, axis=0), (BC // SIZE, SIZE)), axis=1) * (1.0 / (HW * SIZE))
    return tl.reshape(tl.broadcast_to(by_group[:, None], (BC // SIZE, SIZE)), (BC,))


@triton.jit
def forward_kernel(
    x, weight, bias, other, y, statistics, epsilon,
    RELU: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr,
    BHW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = (x − m) / √(v + ε) · weight + bias (+ other), no less than 0 if RELU. ``statistics``,
    ``[B, 2, C]``, takes m and 1 / √(v + ε).
    """
    EVEN: tl.constexpr = (BHW == HW) and (C % BC == 0)
    offsets, inside, channel = _place(C, HW, BHW, BC)
    there = channel < C
    values = _read(x, offsets, inside, EVEN).to(tl.float32)
    mean = _group_mean(values, HW, SIZE, BC)
    values = values - mean[None, :]
    if not EVEN:
        values = tl.where(inside, values, 0.0)
    inverse = tl.rsqrt(_group_mean(values * values, HW, SIZE, BC) + epsilon)
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32) * inverse
    shift = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    values = values * scale[None, :] + shift[None, :]
    if other is not None:
        values += _read(other, offsets, inside, EVEN).to(tl.float32)
    if RELU:
        values = tl.maximum(values, 0.0)
    _write(y, offsets, values, inside, EVEN)
    if statistics is not None:
        place = statistics + tl.program_id(0).to(tl.int64) * (2 * C) + channel
        tl.store(place, mean, mask=there)
        tl.store(place + C, inverse, mask=there)


@triton.jit
def backward_kernel(
    x, weight, y, grad, statistics, grad_x, grad_other,
    RELU: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr,
    BHW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """∂other = ∂y where y > 0; ∂x = (g − mean g − x̂ · mean (g x̂)) / √(v + ε), with x̂ the normalised x and
    g = ∂other · weight.
    """
    EVEN: tl.constexpr = (BHW == HW) and (C % BC == 0)
    offsets, inside, channel = _place(C, HW, BHW, BC)
    there = channel < C
    given = _read(grad, offsets, inside, EVEN)
    if RELU:
        given = tl.where(_read(y, offsets, inside, EVEN) > 0, given, 0.0)
    if grad_other is not None:
        _write(grad_other, offsets, given, inside, EVEN)
    place = statistics + tl.program_id(0).to(tl.int64) * (2 * C) + channel
    mean = tl.load(place, mask=there, other=0.0)
    inverse = tl.load(place + C, mask=there, other=0.0)
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    own = _read(x, offsets, inside, EVEN)
    normal = (own.to(tl.float32) - mean[None, :]) * inverse[None, :]
    g = given.to(tl.float32) * scale[None, :]
    average, along = _group_mean(g, HW, SIZE, BC), _group_mean(g * normal, HW, SIZE, BC)
    found = (g - average[None, :] - normal * along[None, :]) * inverse[None, :]
    _write(grad_x, offsets, found, inside, EVEN)
