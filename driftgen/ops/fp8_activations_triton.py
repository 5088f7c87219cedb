# mypy: ignore-errors
"""The SwiGLU kernel of ``driftgen.ops.fp8_activations``: silu(gate) · value, quantized to float8."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["swiglu_kernel"]

LOG2_E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)  # largest finite float8e4nv


@triton.jit
def swiglu_kernel(
    both, quantized, scales, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """y = silu(gate) · value from ``both`` ``[rows, 2 · WIDTH]``, s = max |y| / 448 of each row, q = y / s.

    A program holds whole rows and reads them once. It rounds where PyTorch rounds.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    kind: tl.constexpr = both.dtype.element_ty
    at = both + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    # g / (1 + e⁻ᵍ) without the special cases of a division; an infinite e⁻ᵍ gives zero.
    inverse = tl.rsqrt(1.0 + tl.exp2(gate * -LOG2_E))
    silu = (gate * inverse * inverse).to(kind).to(tl.float32)
    y = (silu * value).to(kind).to(tl.float32)
    # The lower bound keeps a row of zeros zero.
    scale = tl.maximum(tl.max(tl.abs(y), axis=1)[:, None], 1e-12) * (1.0 / FP8_MAX)
    q = (y * tl.div_rn(1.0, scale)).to(quantized.dtype.element_ty)
    tl.store(quantized + row * WIDTH + column, q, mask=inside)
    tl.store(scales + row, scale, mask=row < rows)
