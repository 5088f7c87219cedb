"""The kernels of ``driftgen.ops.group_norm``.

A program holds all locations of some groups of one sample in registers, so maps are read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _groups(C: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """Return the sample of this program, its groups ``[GROUPS]`` and its channels ``[GROUPS, SIZE]``.

    Adjacent programs have adjacent channels, which share cache lines.
    """
    BLOCKS: tl.constexpr = (C // SIZE + GROUPS - 1) // GROUPS
    sample, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    group = block * GROUPS + tl.arange(0, GROUPS)
    return sample, group, group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _offsets(sample, channel, C: tl.constexpr, HW: tl.constexpr, ROWS: tl.constexpr):
    """Return the offsets of all locations, ``[ROWS, GROUPS, SIZE]``, and their mask."""
    location = tl.arange(0, ROWS)
    offsets = sample * (HW * C) + (location[:, None, None] * C + channel[None, :, :])
    return offsets, (location < HW)[:, None, None] & (channel < C)[None, :, :]


@triton.jit
def _read(pointer, offsets, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer + offsets)
    else:  # without else, the load would be compiled in any case
        return tl.load(pointer + offsets, mask=inside, other=0.0)


@triton.jit
def _write(pointer, offsets, values, inside, EVEN: tl.constexpr):
    values = values.to(pointer.dtype.element_ty)
    if EVEN:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=inside)


@triton.jit
def _mean(sums, NUMBERS: tl.constexpr):
    """Return the mean of each group, ``[GROUPS]``, from its sums over channels ``[ROWS, GROUPS]``."""
    total = tl.sum(sums, axis=0)
    # Rounded here: the compiler could fuse a product with the following difference, and x − m would not use
    # the m that is stored. Multiplying by a power of two is exact.
    if NUMBERS & (NUMBERS - 1) == 0:
        return total * (1.0 / NUMBERS)
    else:
        return tl.div_rn(total, tl.full(total.shape, NUMBERS, tl.float32))


@triton.jit
def _affine(centered, scale, shift):
    """(x − m) · scale + shift, rounded once. Both passes use it, so that they agree on y > 0."""
    return tl.fma(centered, tl.broadcast_to(scale[None, :, :], centered.shape), shift[None, :, :])


@triton.jit
def forward_kernel(
    x, weight, bias, other, y, statistics, epsilon,
    RELU: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """y = (x − m) / √(v + ε) · weight + bias (+ other), with ReLU if RELU. Stores m and 1 / √(v + ε) to
    ``statistics`` ``[B, 2, groups]`` unless None.
    """
    COUNT: tl.constexpr = C // SIZE
    EVEN: tl.constexpr = (HW % ROWS == 0) and (COUNT % GROUPS == 0)
    sample, group, channel = _groups(C, SIZE, GROUPS)
    valid = channel < C
    scale = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    offsets, inside = _offsets(sample, channel, C, HW, ROWS)
    values = _read(x, offsets, inside, EVEN).to(tl.float32)
    mean = _mean(tl.sum(values, axis=2), HW * SIZE)
    values = values - mean[None, :, None]
    if not EVEN:
        values = tl.where(inside, values, 0.0)
    inverse = tl.rsqrt(_mean(tl.sum(values * values, axis=2), HW * SIZE) + epsilon)
    values = _affine(values, scale * inverse[:, None], shift)
    if other is not None:
        values += _read(other, offsets, inside, EVEN).to(tl.float32)
    if RELU:
        values = tl.maximum(values, 0.0)
    _write(y, offsets, values, inside, EVEN)
    if statistics is not None:
        place = statistics + sample * (2 * COUNT) + group
        tl.store(place, mean, mask=group < COUNT)
        tl.store(place + COUNT, inverse, mask=group < COUNT)


@triton.jit
def backward_kernel(
    x, weight, bias, y, grad, statistics, grad_x, grad_other,
    RELU: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """∂other = ∂y where y > 0; ∂x = (g − mean g − x̂ · mean (g x̂)) / √(v + ε), with x̂ the normalized x and
    g = ∂other · weight. If y is None, y > 0 is recomputed from x as in the forward pass.
    """
    COUNT: tl.constexpr = C // SIZE
    EVEN: tl.constexpr = (HW % ROWS == 0) and (COUNT % GROUPS == 0)
    sample, group, channel = _groups(C, SIZE, GROUPS)
    valid = channel < C
    place = statistics + sample * (2 * COUNT) + group
    mean = tl.load(place, mask=group < COUNT, other=0.0)
    inverse = tl.load(place + COUNT, mask=group < COUNT, other=0.0)
    scale = tl.load(weight + channel, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
    offsets, inside = _offsets(sample, channel, C, HW, ROWS)
    d = _read(grad, offsets, inside, EVEN)
    values = _read(x, offsets, inside, EVEN)
    centered = values.to(tl.float32) - mean[None, :, None]
    if RELU:
        if y is not None:
            d = tl.where(_read(y, offsets, inside, EVEN) > 0, d, 0.0)
        else:
            # Rounded as it was stored: small values may have become 0. Compared in float32, because Triton's
            # interpreter would compare the bits of bfloat16.
            output = _affine(centered, scale * inverse[:, None], shift).to(values.dtype)
            d = tl.where(output.to(tl.float32) > 0, d, 0.0)
    if grad_other is not None:
        _write(grad_other, offsets, d, inside, EVEN)
    g = d.to(tl.float32) * scale[None, :, :]
    mean_g = _mean(tl.sum(g, axis=2), HW * SIZE)
    mean_gx = _mean(tl.sum(g * centered, axis=2), HW * SIZE)
    d_factor, x_factor = scale * inverse[:, None], inverse * inverse * inverse * mean_gx
    constant = (mean_g * inverse)[None, :, None]
    gradient = d.to(tl.float32) * d_factor[None, :, :] - centered * x_factor[None, :, None] - constant
    _write(grad_x, offsets, gradient, inside, EVEN)
