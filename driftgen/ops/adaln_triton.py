# mypy: ignore-errors
"""The kernels of ``driftgen.ops.adaln``: add a gated branch to the residual stream, normalize and modulate
the sum for the next branch; and the gradients of both.

A program handles a chunk of the tokens of one sample, ROWS at a time, with a whole token in registers and
STAGES loads in flight. It loads scale, shift and gate of the sample once. In the backward pass it accumulates
their gradients in registers and stores them once, so that the sums do not depend on the order in which
programs finish.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]

EPS = tl.constexpr(1e-6)
FP8_MAX = tl.constexpr(448.0)  # largest finite float8e4nv


@triton.jit
def _tokens(tokens, chunk):
    """Return the sample of this program, its first token, and the end of its tokens."""
    chunks = (tokens + chunk - 1) // chunk
    pid = tl.program_id(0)
    first = (pid % chunks) * chunk
    return (pid // chunks).to(tl.int64), first, tl.minimum(first + chunk, tokens)


@triton.jit
def _modulation(pointer, column, inside, DTYPE: tl.constexpr):
    """Load scale, shift or gate of a sample, ``[1, BLOCK]``, rounded to the dtype of the stream."""
    return tl.load(pointer + column, mask=inside, other=0.0).to(DTYPE).to(tl.float32)[None, :]


@triton.jit
def _rows(tensor, at, inside):
    return tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x, branch, gate, weight, scale, shift, total, normed, fp8_scales,
    x_stride, gate_stride, scale_stride, shift_stride, tokens, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, NORMED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """total = x + gate · branch if GATED; normed = total / √(mean total² + ε) · weight · (1 + scale) + shift
    if NORMED. If FP8, normed is stored as n / s with s = max |n| / 448 of each token in ``fp8_scales``.

    Strides are those between samples.
    """
    sample, start, end = _tokens(tokens, chunk)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    stream: tl.constexpr = x.dtype.element_ty
    x += sample * x_stride
    offset = sample * tokens * WIDTH
    if GATED:
        g = _modulation(gate + sample * gate_stride, column, within, stream)
        branch += offset
        total += offset
    if NORMED:
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
        factor *= 1.0 + _modulation(scale + sample * scale_stride, column, within, stream)
        summand = _modulation(shift + sample * shift_stride, column, within, stream)
        normed += offset
    for row in tl.range(start, end, ROWS, num_stages=STAGES):
        r = row + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & within[None, :]
        at = r[:, None] * WIDTH + column[None, :]
        value = _rows(x, at, inside)
        if GATED:
            value = (value + g * _rows(branch, at, inside)).to(stream)
            tl.store(total + at, value, mask=inside)
            value = value.to(tl.float32)
        if NORMED:
            inverse = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] * (1.0 / WIDTH) + EPS)
            value = value * inverse * factor + summand
            if FP8:
                value = value.to(stream).to(tl.float32)
                # The lower bound keeps a token of zeros zero.
                largest = tl.max(tl.where(inside, tl.abs(value), 0.0), axis=1)
                unit = tl.maximum(largest, 1e-12) * (1.0 / FP8_MAX)
                value *= tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), unit)[:, None]
                tl.store(fp8_scales + sample * tokens + r, unit, mask=r < end)
            tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_total, grad_normed, total, branch, gate, weight, scale, grad_x, grad_branch, sums,
    total_stride, gate_stride, scale_stride, tokens, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    GRAD_TOTAL: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The gradients of the inputs of ``forward_kernel``; GRAD_TOTAL if ``total`` has a gradient of its own.

    With x̂ = total · r, r = 1 / √(mean total² + ε), and n the gradient of ``normed``:
    d = r (n w (1 + scale) − x̂ mean(n w (1 + scale) x̂)) + the gradient of ``total`` is the gradient of x, and
    gate · d that of the branch. Each program stores Σ n and Σ n x̂ to ``sums`` if NORMED, then Σ d · branch if
    GATED.
    """
    sample, start, end = _tokens(tokens, chunk)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    offset = sample * tokens * WIDTH
    if GRAD_TOTAL:
        grad_total += offset
    if NORMED:
        stream: tl.constexpr = total.dtype.element_ty
        total += sample * total_stride
        grad_normed += offset
        grad_x += offset
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
        factor *= 1.0 + _modulation(scale + sample * scale_stride, column, within, stream)
        shift_sum, scale_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if GATED:
        branch += offset
        grad_branch += offset
        g = _modulation(gate + sample * gate_stride, column, within, grad_total.dtype.element_ty)
        gate_sum = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(start, end, ROWS, num_stages=STAGES):
        r = row + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & within[None, :]
        at = r[:, None] * WIDTH + column[None, :]
        if GRAD_TOTAL:
            d = _rows(grad_total, at, inside)
        if NORMED:
            value = _rows(total, at, inside)
            n = _rows(grad_normed, at, inside)
            inverse = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] * (1.0 / WIDTH) + EPS)
            value *= inverse
            shift_sum += tl.sum(n, axis=0)
            scale_sum += tl.sum(n * value, axis=0)
            n *= factor
            mean = tl.sum(n * value, axis=1)[:, None] * (1.0 / WIDTH)
            n = inverse * (n - value * mean)
            d = d + n if GRAD_TOTAL else n
            tl.store(grad_x + at, d.to(grad_x.dtype.element_ty), mask=inside)
        if GATED:
            gate_sum += tl.sum(d * _rows(branch, at, inside), axis=0)
            tl.store(grad_branch + at, (d * g).to(grad_branch.dtype.element_ty), mask=inside)
    count: tl.constexpr = 2 * NORMED + GATED
    sums += tl.program_id(0).to(tl.int64) * (count * WIDTH) + column
    if NORMED:
        tl.store(sums, shift_sum, mask=within)
        tl.store(sums + WIDTH, scale_sum, mask=within)
        sums += 2 * WIDTH
    if GATED:
        tl.store(sums, gate_sum, mask=within)
