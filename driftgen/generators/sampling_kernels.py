# mypy: ignore-errors
"""What sampling does between the products of a Transformer block, without gradients: attention from the
output of its linear layer, and a gated activation in 8-bit numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attention_kernel", "swiglu_kernel"]

EPS = tl.constexpr(1e-6)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(448.0)  # of float8e4nv
SAFE = tl.constexpr(64.0)  # scores in base 2 whose exponentials, and sums of them, float32 and bfloat16 hold


@triton.jit
def _halves(x, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = start + tl.arange(0, ROWS)[:, None]
    at = x + t * STRIDE + tl.arange(0, HALF)[None, :]
    a = tl.load(at, mask=t < TOKENS, other=0.0)
    return a, tl.load(at + HALF, mask=t < TOKENS, other=0.0)


@triton.jit
def _angles(cos, sin, start, TOKENS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = start + tl.arange(0, ROWS)[:, None]
    at = t * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + at, mask=t < TOKENS, other=0.0)
    return c, tl.load(sin + at, mask=t < TOKENS, other=0.0)


@triton.jit
def _turn(a, b, wa, wb, cos, sin, start, TOKENS: tl.constexpr):
    """Queries or keys of a head from their halves ``[rows, HALF]``, and in halves: normalised, rounded as the
    module's norm rounds, and turned.
    """
    kind: tl.constexpr = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    r = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] * (0.5 / a.shape[1]) + EPS)
    a = (a * r * wa).to(kind).to(tl.float32)
    b = (b * r * wb).to(kind).to(tl.float32)
    c, s = _angles(cos, sin, start, TOKENS, a.shape[1], a.shape[0])
    return (a * c - b * s).to(kind), (b * c + a * s).to(kind)


@triton.jit
def _joined(a, b):
    """The halves side by side: a thread has 8 numbers of each, which then move nowhere."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _turned(
    x, wa, wb, cos, sin, start,
    TOKENS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    a, b = _halves(x, start, TOKENS, STRIDE, HALF, ROWS)
    a, b = _turn(a, b, wa, wb, cos, sin, start, TOKENS)
    return _joined(a, b)


@triton.jit
def _values(x, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + t * STRIDE + tl.arange(0, 2 * HALF)[None, :], mask=t < TOKENS, other=0.0)


@triton.jit
def _exponentials(
    query, key, most, weight, total, start, scale, large, TOKENS: tl.constexpr, KEYS: tl.constexpr
):  # fmt: skip
    """2^(scores − most) for some more keys, and their sum added to that of the keys before.

    Where scores can be large, ``most`` is the largest so far, and what was summed before is made to fit it.
    Else it is zero, and the exponentials need not wait for it.
    """
    s = tl.dot(query, tl.trans(key))
    if large:
        if start + KEYS > TOKENS:
            s = tl.where(start + tl.arange(0, KEYS)[None, :] < TOKENS, s, -float("inf"))
        larger = tl.maximum(most, tl.max(s, axis=1) * scale)
        fade = tl.exp2(most - larger)
        weight *= fade
        total *= fade[:, None]
        most = larger
    p = tl.exp2(s * scale - most[:, None])
    if start + KEYS > TOKENS:
        p = tl.where(start + tl.arange(0, KEYS)[None, :] < TOKENS, p, 0.0)
    return p, most, weight + tl.sum(p, axis=1), total


@triton.jit
def attention_kernel(
    qkv, query_weight, key_weight, cos, sin, out, scale,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ / √head) v for one head of one sample, from ``qkv`` ``[B, TOKENS, 3, HEADS, 2 · HALF]`` to
    ``out`` ``[B, TOKENS, HEADS, 2 · HALF]``; ``scale`` is log₂ e / √head.

    Keys are normalised and turned once, in blocks of BK and a last one of REST; the compiler keeps them and
    the values in shared memory, as they are the same for all blocks of BQ queries.
    """
    width: tl.constexpr = HEADS * 2 * HALF
    stride: tl.constexpr = 3 * width
    full: tl.constexpr = TOKENS // BK
    sample = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    qkv += sample * (TOKENS * stride) + head * (2 * HALF)
    out += sample * (TOKENS * width) + head * (2 * HALF)
    j = tl.arange(0, HALF)[None, :]
    wa, wb = tl.load(key_weight + j).to(tl.float32), tl.load(key_weight + HALF + j).to(tl.float32)
    kept = ()
    for i in tl.static_range(full):
        key = _turned(qkv + width, wa, wb, cos, sin, i * BK, TOKENS, stride, HALF, BK)
        value = _values(qkv + 2 * width, i * BK, TOKENS, stride, HALF, BK)
        kept = kept + (key, value)  # noqa: RUF005 (the kernel language has no unpacking)
    if REST > 0:
        last_key = _turned(qkv + width, wa, wb, cos, sin, full * BK, TOKENS, stride, HALF, REST)
    if BOUNDED:
        bound = tl.max(tl.maximum(tl.abs(wa), tl.abs(wb)))
    wa, wb = tl.load(query_weight + j).to(tl.float32), tl.load(query_weight + HALF + j).to(tl.float32)
    if BOUNDED:
        # |q·k| ≤ |q| |k| ≤ head · max |weight of q| · max |weight of k|.
        bound *= tl.max(tl.maximum(tl.abs(wa), tl.abs(wb))) * (2 * HALF) * scale
        large = bound > SAFE
    else:
        large = True
    for start in range(0, TOKENS, BQ):
        query = _turned(qkv, wa, wb, cos, sin, start, TOKENS, stride, HALF, BQ)
        total = tl.zeros((BQ, 2 * HALF), tl.float32)
        weight = tl.zeros((BQ,), tl.float32)
        most = tl.where(large, -float("inf"), 0.0) + weight
        for i in tl.static_range(full):
            p, most, weight, total = _exponentials(
                query, kept[2 * i], most, weight, total, i * BK, scale, large, TOKENS, BK
            )  # fmt: skip
            total = tl.dot(p.to(query.dtype), kept[2 * i + 1], total)
        if REST > 0:
            p, most, weight, total = _exponentials(
                query, last_key, most, weight, total, full * BK, scale, large, TOKENS, REST
            )  # fmt: skip
            # Read again each time: kept, a third program would not fit a multiprocessor.
            last_value = _values(qkv + 2 * width, full * BK, TOKENS, stride, HALF, REST)
            total = tl.dot(p.to(query.dtype), last_value, total)
        total *= (1.0 / weight)[:, None]
        t = start + tl.arange(0, BQ)[:, None]
        at = out + t * width + tl.arange(0, 2 * HALF)[None, :]
        tl.store(at, total.to(out.dtype.element_ty), mask=t < TOKENS)


@triton.jit
def swiglu_kernel(
    both, eights, scales, rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """y = silu(gate) · value from ``both`` ``[rows, 2 · WIDTH]``, s = max |y| / 448 of each row, q = y / s.

    A program holds whole rows, so that they are read once. Rounded where PyTorch rounds.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < WIDTH)
    kind: tl.constexpr = both.dtype.element_ty
    at = both + row * (2 * WIDTH) + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    # g / (1 + e⁻ᵍ) without the checks of a division; where e⁻ᵍ is infinite it gives zero.
    inverse = tl.rsqrt(1.0 + tl.exp2(gate * -LOG2_E))
    silu = (gate * inverse * inverse).to(kind).to(tl.float32)
    y = (silu * value).to(kind).to(tl.float32)
    # A row of zeros has to stay one.
    scale = tl.maximum(tl.max(tl.abs(y), axis=1)[:, None], 1e-12) * (1.0 / LARGEST)
    q = (y * tl.div_rn(1.0, scale)).to(eights.dtype.element_ty)
    tl.store(eights + row * WIDTH + column, q, mask=inside)
    tl.store(scales + row, scale, mask=row < rows)
