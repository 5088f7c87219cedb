# mypy: ignore-errors
"""The kernels of ``driftgen.ops.swiglu``: silu(gate) · value and its gradients.

A program handles a block of columns of some rows, ROWS at a time. In the backward pass it accumulates the
column sums of its gradients in registers and stores them once, so that the sums do not depend on the order in
which programs finish.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(x):
    """1 / (1 + e⁻ˣ) without the special cases of a division; an infinite e⁻ˣ gives zero."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def forward_kernel(
    both, out, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Compute ``out`` ``[rows, WIDTH]`` from ``both`` ``[rows, 2 · WIDTH]``: the gate, then the value."""
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows - first) & (column < WIDTH)
    at = both + first * (2 * WIDTH) + (row * (2 * WIDTH) + column)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    y = gate * _sigmoid(gate) * value
    tl.store(out + first * WIDTH + (row * WIDTH + column), y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad, both, grad_both, out, sums, rows, chunk,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """From the gradient of ``out``, compute that of ``both``, ``out`` itself again, and the sums of the
    gradient over the ``chunk`` rows of each program, ``[programs, 2 · WIDTH]``.

    With s = sigmoid(gate), the gradient of the value is grad · gate s, and that of the gate is
    grad · value (s + gate s (1 − s)).
    """
    first = tl.program_id(0).to(tl.int64) * chunk
    count = tl.minimum(rows - first, chunk).to(tl.int32)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    within = column < WIDTH
    grad += first * WIDTH
    out += first * WIDTH
    both += first * (2 * WIDTH)
    grad_both += first * (2 * WIDTH)
    gate_sum, value_sum = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(0, count, ROWS):
        r = row + tl.arange(0, ROWS)
        inside = (r < count)[:, None] & within[None, :]
        narrow = r[:, None] * WIDTH + column[None, :]
        wide = r[:, None] * (2 * WIDTH) + column[None, :]
        gate = tl.load(both + wide, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(both + (wide + WIDTH), mask=inside, other=0.0).to(tl.float32)
        d = tl.load(grad + narrow, mask=inside, other=0.0).to(tl.float32)
        s = _sigmoid(gate)
        silu = gate * s
        d_gate = d * value * (s + silu * (1.0 - s))
        d_value = d * silu
        tl.store(grad_both + wide, d_gate.to(grad_both.dtype.element_ty), mask=inside)
        tl.store(grad_both + (wide + WIDTH), d_value.to(grad_both.dtype.element_ty), mask=inside)
        tl.store(out + narrow, (silu * value).to(out.dtype.element_ty), mask=inside)
        gate_sum += tl.sum(d_gate, axis=0)
        value_sum += tl.sum(d_value, axis=0)
    sums += tl.program_id(0).to(tl.int64) * (2 * WIDTH) + column
    tl.store(sums, gate_sum, mask=within)
    tl.store(sums + WIDTH, value_sum, mask=within)
