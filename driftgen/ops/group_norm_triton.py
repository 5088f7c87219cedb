"""The kernels of ``driftgen.ops.group_norm``: a program has all locations of some groups of a sample.

Maps that fit its registers come from memory once, and go to memory once. Larger ones are read twice, ROWS
locations at a time, while those that follow are being read (STAGES: how often ROWS are under way).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]


@triton.jit
def _place(C: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr):
    """The sample of this program, its groups ``[GROUPS]`` and its channels ``[GROUPS, SIZE]``.

    Programs beside each other have channels beside each other, which lie in the same pieces of memory.
    """
    BLOCKS: tl.constexpr = (C // SIZE + GROUPS - 1) // GROUPS
    sample, block = (tl.program_id(0) // BLOCKS).to(tl.int64), tl.program_id(0) % BLOCKS
    group = block * GROUPS + tl.arange(0, GROUPS)
    return sample, group, group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _numbers(sample, first, channel, C: tl.constexpr, HW: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of the numbers of ROWS locations, ``[ROWS, GROUPS, SIZE]``, and which of them exist."""
    location = first + tl.arange(0, ROWS)
    offsets = sample * (HW * C) + (location[:, None, None] * C + channel[None, :, :])
    return offsets, (location < HW)[:, None, None] & (channel < C)[None, :, :]


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
def _mean(by_location, NUMBERS: tl.constexpr):
    """The mean of each group, ``[GROUPS]``, from its sums over channels ``[ROWS, GROUPS]``."""
    total = tl.sum(by_location, axis=0)
    # Rounded once, whatever follows: a compiler would join a product and a difference into one operation,
    # and x − m would not be what it is with the m that was written. A power of two rounds nothing.
    if NUMBERS & (NUMBERS - 1) == 0:
        return total * (1.0 / NUMBERS)
    else:
        return tl.div_rn(total, tl.full(total.shape, NUMBERS, tl.float32))


@triton.jit
def _affine(centred, scale, shift):
    """(x − m) · scale + shift, rounded once. One function for both passes: y > 0 is to be the same."""
    return tl.fma(centred, tl.broadcast_to(scale[None, :, :], centred.shape), shift[None, :, :])


@triton.jit
def _moments(
    x, sample, channel, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Mean and variance of each group, ``[GROUPS]``.

    Every ROWS-th location has a mean and a sum of squares about it of its own, to which the next numbers are
    joined: m += (m' − m) n' / (n + n'), q += q' + (m' − m)² n n' / (n + n'). So no digits are lost to a mean
    far from zero, and threads meet only at the end.
    """
    count = tl.zeros((ROWS,), tl.float32)
    means = tl.zeros((ROWS, GROUPS), tl.float32)
    squares = tl.zeros((ROWS, GROUPS), tl.float32)
    for first in tl.range(0, HW, ROWS, num_stages=STAGES):
        offsets, inside = _numbers(sample, first, channel, C, HW, ROWS)
        values = _read(x, offsets, inside, EVEN).to(tl.float32)
        mean = tl.sum(values, axis=2) * (1.0 / SIZE)
        values -= mean[:, :, None]
        here = tl.where(first + tl.arange(0, ROWS) < HW, SIZE * 1.0, 0.0)
        total = count + here
        share = (here / total)[:, None]
        away = mean - means
        squares += tl.sum(values * values, axis=2) + away * away * (count[:, None] * share)
        means += away * share
        count = total
    mean = _mean(means * count[:, None], HW * SIZE)
    away = means - mean[None, :]
    return mean, _mean(squares + away * away * count[:, None], HW * SIZE)


@triton.jit
def _finish(centred, scale, shift, other, y, offsets, inside, RELU: tl.constexpr, EVEN: tl.constexpr):
    values = _affine(centred, scale, shift)
    if other is not None:
        values += _read(other, offsets, inside, EVEN).to(tl.float32)
    if RELU:
        values = tl.maximum(values, 0.0)
    _write(y, offsets, values, inside, EVEN)


@triton.jit
def forward_kernel(
    x, weight, bias, other, y, statistics, epsilon,
    RELU: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y = (x − m) / √(v + ε) · weight + bias (+ other), no less than 0 if RELU. ``statistics``,
    ``[B, 2, groups]``, takes m and 1 / √(v + ε). With ROWS of less than HW, x is read twice.
    """
    COUNT: tl.constexpr = C // SIZE
    EVEN: tl.constexpr = (HW % ROWS == 0) and (COUNT % GROUPS == 0)
    sample, group, channel = _place(C, SIZE, GROUPS)
    there = channel < C
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    if ROWS >= HW:
        offsets, inside = _numbers(sample, 0, channel, C, HW, ROWS)
        values = _read(x, offsets, inside, EVEN).to(tl.float32)
        mean = _mean(tl.sum(values, axis=2), HW * SIZE)
        values = values - mean[None, :, None]
        if not EVEN:
            values = tl.where(inside, values, 0.0)
        inverse = tl.rsqrt(_mean(tl.sum(values * values, axis=2), HW * SIZE) + epsilon)
        _finish(values, scale * inverse[:, None], shift, other, y, offsets, inside, RELU, EVEN)
    else:
        mean, variance = _moments(x, sample, channel, C, HW, SIZE, GROUPS, ROWS, STAGES, EVEN)
        inverse = tl.rsqrt(variance + epsilon)
        scale *= inverse[:, None]
        for first in tl.range(0, HW, ROWS, num_stages=STAGES):
            offsets, inside = _numbers(sample, first, channel, C, HW, ROWS)
            values = _read(x, offsets, inside, EVEN).to(tl.float32) - mean[None, :, None]
            _finish(values, scale, shift, other, y, offsets, inside, RELU, EVEN)
    if statistics is not None:
        place = statistics + sample * (2 * COUNT) + group
        tl.store(place, mean, mask=group < COUNT)
        tl.store(place + COUNT, inverse, mask=group < COUNT)


@triton.jit
def _given(
    x, y, grad, offsets, inside, mean, inverse, scale, shift, RELU: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """∂y where y > 0, and x − m. Where no y is given, it is found from x as in the forward pass."""
    given = _read(grad, offsets, inside, EVEN)
    own = _read(x, offsets, inside, EVEN)
    centred = own.to(tl.float32) - mean[None, :, None]
    if RELU:
        if y is not None:
            given = tl.where(_read(y, offsets, inside, EVEN) > 0, given, 0.0)
        else:
            # As it was written: small numbers may have become 0. (The interpreter compares bits of bfloat16.)
            found = _affine(centred, scale * inverse[:, None], shift).to(own.dtype)
            given = tl.where(found.to(tl.float32) > 0, given, 0.0)
    return given, centred


@triton.jit
def _gradient(given, centred, scale, inverse, average, along):
    """(g − mean g − x̂ · mean (g x̂)) / √(v + ε), given the means of g and of g · (x − m)."""
    of_given, of_centred = scale * inverse[:, None], inverse * inverse * inverse * along
    constant = (average * inverse)[None, :, None]
    return given.to(tl.float32) * of_given[None, :, :] - centred * of_centred[None, :, None] - constant


@triton.jit
def backward_kernel(
    x, weight, bias, y, grad, statistics, grad_x, grad_other,
    RELU: tl.constexpr, C: tl.constexpr, HW: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """∂other = ∂y where y > 0; ∂x = (g − mean g − x̂ · mean (g x̂)) / √(v + ε), with x̂ the normalised x and
    g = ∂other · weight.

    With ROWS of less than HW everything is read twice, but for ∂y and y where ∂other holds what is needed.
    """
    COUNT: tl.constexpr = C // SIZE
    EVEN: tl.constexpr = (HW % ROWS == 0) and (COUNT % GROUPS == 0)
    sample, group, channel = _place(C, SIZE, GROUPS)
    there = channel < C
    place = statistics + sample * (2 * COUNT) + group
    mean = tl.load(place, mask=group < COUNT, other=0.0)
    inverse = tl.load(place + COUNT, mask=group < COUNT, other=0.0)
    scale = tl.load(weight + channel, mask=there, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=there, other=0.0).to(tl.float32)
    if ROWS >= HW:
        offsets, inside = _numbers(sample, 0, channel, C, HW, ROWS)
        given, centred = _given(x, y, grad, offsets, inside, mean, inverse, scale, shift, RELU, EVEN)
        if grad_other is not None:
            _write(grad_other, offsets, given, inside, EVEN)
        g = given.to(tl.float32) * scale[None, :, :]
        average = _mean(tl.sum(g, axis=2), HW * SIZE)
        along = _mean(tl.sum(g * centred, axis=2), HW * SIZE)
        _write(grad_x, offsets, _gradient(given, centred, scale, inverse, average, along), inside, EVEN)
    else:
        plain = tl.zeros((ROWS, GROUPS), tl.float32)
        product = tl.zeros((ROWS, GROUPS), tl.float32)
        for first in tl.range(0, HW, ROWS, num_stages=STAGES):
            offsets, inside = _numbers(sample, first, channel, C, HW, ROWS)
            given, centred = _given(x, y, grad, offsets, inside, mean, inverse, scale, shift, RELU, EVEN)
            if grad_other is not None:
                _write(grad_other, offsets, given, inside, EVEN)
            g = given.to(tl.float32) * scale[None, :, :]
            plain += tl.sum(g, axis=2)
            product += tl.sum(g * centred, axis=2)
        average, along = _mean(plain, HW * SIZE), _mean(product, HW * SIZE)
        if grad_other is not None:
            tl.debug_barrier()  # what was written is read again
        for first in tl.range(0, HW, ROWS, num_stages=STAGES):
            offsets, inside = _numbers(sample, first, channel, C, HW, ROWS)
            if grad_other is not None:
                given = _read(grad_other, offsets, inside, EVEN)
                centred = _read(x, offsets, inside, EVEN).to(tl.float32) - mean[None, :, None]
            else:
                given, centred = _given(x, y, grad, offsets, inside, mean, inverse, scale, shift, RELU, EVEN)
            _write(grad_x, offsets, _gradient(given, centred, scale, inverse, average, along), inside, EVEN)
