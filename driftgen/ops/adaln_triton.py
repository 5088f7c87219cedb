# mypy: ignore-errors
"""The residual stream between two branches of a block, one GPU kernel each way: the branch before is added
through its gate, and what the next branch reads is normalised and modulated.

A program has some tokens of one sample, ROWS of them at a time, all numbers of a token in registers, while
those that follow are being read (STAGES: how often ROWS are under way). What a sample's tokens share is
loaded once; on the way back its gradients are summed in registers, and written once for each program, so that
the sums do not depend on the order in which programs end.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]

EPS = tl.constexpr(1e-6)
LARGEST = tl.constexpr(448.0)  # of float8e4nv


@triton.jit
def _tokens(tokens, chunk):
    """The sample of this program, and its first and last token."""
    chunks = (tokens + chunk - 1) // chunk
    pid = tl.program_id(0)
    first = (pid % chunks) * chunk
    return (pid // chunks).to(tl.int64), first, tl.minimum(first + chunk, tokens)


@triton.jit
def _modulation(part, column, inside, DTYPE: tl.constexpr):
    """Scale, shift or gate of a sample, ``[1, BLOCK]``, rounded as the stream is."""
    return tl.load(part + column, mask=inside, other=0.0).to(DTYPE).to(tl.float32)[None, :]


@triton.jit
def _rows(tensor, at, inside):
    return tl.load(tensor + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def forward_kernel(
    x, branch, gate, weight, scale, shift, total, normed, units,
    x_by_sample, gate_by_sample, scale_by_sample, shift_by_sample, tokens, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, NORMED: tl.constexpr, EIGHT: tl.constexpr,
):  # fmt: skip
    """total = x + gate · branch where GATED, normed = total / √(mean total² + ε) · weight · (1 + scale) +
    shift where NORMED; with EIGHT in 8 bits, n / s with s = max |n| / 448 of each token, which ``units``
    takes.
    """
    sample, start, end = _tokens(tokens, chunk)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    stream: tl.constexpr = x.dtype.element_ty
    x += sample * x_by_sample
    here = sample * tokens * WIDTH
    if GATED:
        g = _modulation(gate + sample * gate_by_sample, column, within, stream)
        branch += here
        total += here
    if NORMED:
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
        factor *= 1.0 + _modulation(scale + sample * scale_by_sample, column, within, stream)
        offset = _modulation(shift + sample * shift_by_sample, column, within, stream)
        normed += here
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
            value = value * inverse * factor + offset
            if EIGHT:
                value = value.to(stream).to(tl.float32)
                # A token of zeros has to stay one.
                largest = tl.max(tl.where(inside, tl.abs(value), 0.0), axis=1)
                unit = tl.maximum(largest, 1e-12) * (1.0 / LARGEST)
                value *= tl.div_rn(tl.full(unit.shape, 1.0, tl.float32), unit)[:, None]
                tl.store(units + sample * tokens + r, unit, mask=r < end)
            tl.store(normed + at, value.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_total, grad_normed, total, branch, gate, weight, scale, grad_x, grad_branch, sums,
    total_by_sample, gate_by_sample, scale_by_sample, tokens, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    STREAM: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The gradients of what ``forward_kernel`` read; STREAM where ``total`` has a gradient of its own.

    With x̂ = total · r, r = 1 / √(mean total² + ε), and n the gradient of ``normed``:
    d = r (n w (1 + scale) − x̂ mean(n w (1 + scale) x̂)) + the gradient of ``total`` is that of x, gate · d
    that of the branch. Of each program ``sums`` gets Σ n and Σ n x̂ where NORMED, then Σ d · branch and Σ d
    where GATED.
    """
    sample, start, end = _tokens(tokens, chunk)
    column = tl.arange(0, BLOCK)
    within = column < WIDTH
    here = sample * tokens * WIDTH
    if STREAM:
        grad_total += here
    if NORMED:
        stream: tl.constexpr = total.dtype.element_ty
        total += sample * total_by_sample
        grad_normed += here
        grad_x += here
        factor = tl.load(weight + column, mask=within, other=0.0).to(tl.float32)[None, :]
        factor *= 1.0 + _modulation(scale + sample * scale_by_sample, column, within, stream)
        by_shift, by_scale = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    if GATED:
        branch += here
        grad_branch += here
        g = _modulation(gate + sample * gate_by_sample, column, within, grad_total.dtype.element_ty)
        by_gate, by_total = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(start, end, ROWS, num_stages=STAGES):
        r = row + tl.arange(0, ROWS)
        inside = (r < end)[:, None] & within[None, :]
        at = r[:, None] * WIDTH + column[None, :]
        if STREAM:
            d = _rows(grad_total, at, inside)
        if NORMED:
            value = _rows(total, at, inside)
            n = _rows(grad_normed, at, inside)
            inverse = tl.rsqrt(tl.sum(value * value, axis=1)[:, None] * (1.0 / WIDTH) + EPS)
            value *= inverse
            by_shift += tl.sum(n, axis=0)
            by_scale += tl.sum(n * value, axis=0)
            n *= factor
            mean = tl.sum(n * value, axis=1)[:, None] * (1.0 / WIDTH)
            n = inverse * (n - value * mean)
            d = d + n if STREAM else n
            tl.store(grad_x + at, d.to(grad_x.dtype.element_ty), mask=inside)
        if GATED:
            by_gate += tl.sum(d * _rows(branch, at, inside), axis=0)
            by_total += tl.sum(d, axis=0)
            tl.store(grad_branch + at, (d * g).to(grad_branch.dtype.element_ty), mask=inside)
    count: tl.constexpr = 2 * NORMED + 2 * GATED
    sums += tl.program_id(0).to(tl.int64) * (count * WIDTH) + column
    if NORMED:
        tl.store(sums, by_shift, mask=within)
        tl.store(sums + WIDTH, by_scale, mask=within)
        sums += 2 * WIDTH
    if GATED:
        tl.store(sums, by_gate, mask=within)
        tl.store(sums + WIDTH, by_total, mask=within)
