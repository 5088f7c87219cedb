# mypy: ignore-errors
"""The forward kernel of ``driftgen.ops.attention``: norm and rotation of queries and keys, and attention.

A program handles one head of one sample. It keeps all keys and values in shared memory and iterates over
blocks of queries.

Queries, keys and values have 16 bits, so tensor cores multiply them exactly and sum in float32. Softmax
weights are rounded to 16 bits for the next product. With FLOAT32 a second product adds what that rounding
lost.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attention_forward_kernel"]

EPS = tl.constexpr(1e-6)
# Exponentials of base-2 scores up to this, and their sums, do not overflow in float32 or bfloat16.
SAFE = tl.constexpr(64.0)


@triton.jit
def load_weights(weight, HALF: tl.constexpr):
    """Load the halves of a norm's weight. Callers load them at each use: held, they would fill registers."""
    at = weight + tl.arange(0, HALF)[None, :]
    return tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)


@triton.jit
def load_halves(x, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = start + tl.arange(0, ROWS)[:, None]
    at = x + t * STRIDE + tl.arange(0, HALF)[None, :]
    a = tl.load(at, mask=t < TOKENS, other=0.0)
    return a, tl.load(at + HALF, mask=t < TOKENS, other=0.0)


@triton.jit
def load_angles(cos, sin, start, TOKENS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = start + tl.arange(0, ROWS)[:, None]
    at = t * HALF + tl.arange(0, HALF)[None, :]
    c = tl.load(cos + at, mask=t < TOKENS, other=0.0)
    return c, tl.load(sin + at, mask=t < TOKENS, other=0.0)


@triton.jit
def norm_rope(a, b, wa, wb, cos, sin, start, TOKENS: tl.constexpr):
    """Normalize queries or keys given in halves ``[rows, HALF]``, round like the plain norm, and rotate."""
    kind: tl.constexpr = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    r = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] * (0.5 / a.shape[1]) + EPS)
    a = (a * r * wa).to(kind).to(tl.float32)
    b = (b * r * wb).to(kind).to(tl.float32)
    c, s = load_angles(cos, sin, start, TOKENS, a.shape[1], a.shape[0])
    return (a * c - b * s).to(kind), (b * c + a * s).to(kind)


@triton.jit
def concat(a, b):
    """Concatenate the halves. A thread holds 8 elements of each, so no data moves between threads."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def _load_norm_rope(
    x, wa, wb, cos, sin, start,
    TOKENS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    a, b = load_halves(x, start, TOKENS, STRIDE, HALF, ROWS)
    a, b = norm_rope(a, b, wa, wb, cos, sin, start, TOKENS)
    return concat(a, b)


@triton.jit
def load_rows(x, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    t = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + t * STRIDE + tl.arange(0, 2 * HALF)[None, :], mask=t < TOKENS, other=0.0)


@triton.jit
def _exponentials(
    query, key, most, weight, total, start, scale,
    LARGE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute 2^(scores − most) for a block of keys and add their sum to ``weight``.

    If LARGE, ``most`` is the running maximum, and ``weight`` and ``total`` are rescaled to it. Otherwise it
    is zero, and the exponentials do not wait for the maximum.
    """
    s = tl.dot(query, tl.trans(key))
    if LARGE:
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
def product(x, y, total, FLOAT32: tl.constexpr):
    """total + x y with x rounded to the dtype of y; if FLOAT32, a second product adds the rounding error."""
    high = x.to(y.dtype)
    total = tl.dot(high, y, total)
    if FLOAT32:
        total = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, total)
    return total


@triton.jit
def store_rows(values, out, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr):
    t = start + tl.arange(0, values.shape[0])[:, None]
    at = out + t * STRIDE + tl.arange(0, values.shape[1])[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=t < TOKENS)


@triton.jit
def _attend(
    qkv, query_weight, key_weight, cos, sin, out, residue, log_sums, scale,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    REST: tl.constexpr, SUMS: tl.constexpr, FLOAT32: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = HEADS * 2 * HALF
    stride: tl.constexpr = 3 * width
    full: tl.constexpr = TOKENS // BK
    wa, wb = load_weights(key_weight, HALF)
    blocks = ()
    for i in tl.static_range(full):
        key = _load_norm_rope(qkv + width, wa, wb, cos, sin, i * BK, TOKENS, stride, HALF, BK)
        value = load_rows(qkv + 2 * width, i * BK, TOKENS, stride, HALF, BK)
        blocks = blocks + (key, value)
    if REST > 0:
        last_key = _load_norm_rope(qkv + width, wa, wb, cos, sin, full * BK, TOKENS, stride, HALF, REST)
    wa, wb = load_weights(query_weight, HALF)
    for start in range(0, TOKENS, BQ):
        query = _load_norm_rope(qkv, wa, wb, cos, sin, start, TOKENS, stride, HALF, BQ)
        total = tl.zeros((BQ, 2 * HALF), tl.float32)
        weight = tl.zeros((BQ,), tl.float32)
        most = weight - (float("inf") if LARGE else 0.0)
        for i in tl.static_range(full):
            p, most, weight, total = _exponentials(
                query, blocks[2 * i], most, weight, total, i * BK, scale, LARGE, TOKENS, BK
            )
            total = product(p, blocks[2 * i + 1], total, FLOAT32)
        if REST > 0:
            p, most, weight, total = _exponentials(
                query, last_key, most, weight, total, full * BK, scale, LARGE, TOKENS, REST
            )
            # Loaded for every block of queries: in shared memory, a third program would not fit.
            last_value = load_rows(qkv + 2 * width, full * BK, TOKENS, stride, HALF, REST)
            total = product(p, last_value, total, FLOAT32)
        total *= (1.0 / weight)[:, None]
        store_rows(total, out, start, TOKENS, width)
        if SUMS:
            if FLOAT32:
                store_rows(
                    total - total.to(out.dtype.element_ty).to(tl.float32), residue, start, TOKENS, width
                )
            t = start + tl.arange(0, BQ)
            tl.store(log_sums + t, most + tl.log2(weight), mask=t < TOKENS)


@triton.jit
def attention_forward_kernel(
    qkv, query_weight, key_weight, cos, sin, out, residue, log_sums, scale,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    REST: tl.constexpr, SUMS: tl.constexpr, FLOAT32: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ / √head) v for one head of one sample, from ``qkv`` ``[B, TOKENS, 3, HEADS, 2 · HALF]`` to
    ``out`` ``[B, TOKENS, HEADS, 2 · HALF]``. If SUMS, also store log₂ Σ 2^(q kᵀ scale) of each query to
    ``log_sums`` ``[B, HEADS, TOKENS]`` and, if FLOAT32, the rounding error of ``out`` to ``residue``.
    ``scale`` is log₂ e / √head.

    Keys are normalized and rotated once, in blocks of BK and a last one of REST. They and the values stay in
    shared memory, because every block of BQ queries reads them. Unless BOUNDED, the running maximum of the
    scores is always subtracted.
    """
    width: tl.constexpr = HEADS * 2 * HALF
    program = tl.program_id(0).to(tl.int64)
    sample = program // HEADS
    head = program % HEADS
    qkv += sample * (TOKENS * 3 * width) + head * (2 * HALF)
    out += sample * (TOKENS * width) + head * (2 * HALF)
    residue += sample * (TOKENS * width) + head * (2 * HALF)
    if SUMS:
        log_sums += program * TOKENS
    if BOUNDED:
        # |q·k| ≤ |q| |k| ≤ head · max |weight of q| · max |weight of k|. One branch around everything: with a
        # branch between products the compiler would wait for each of them.
        qa, qb = load_weights(query_weight, HALF)
        ka, kb = load_weights(key_weight, HALF)
        bound = tl.max(tl.maximum(tl.abs(qa), tl.abs(qb))) * tl.max(tl.maximum(tl.abs(ka), tl.abs(kb)))
        if bound * (2 * HALF) * scale > SAFE:
            _attend(
                qkv, query_weight, key_weight, cos, sin, out, residue, log_sums, scale,
                TOKENS, HEADS, HALF, BQ, BK, REST, SUMS, FLOAT32, True,
            )  # fmt: skip
        else:
            _attend(
                qkv, query_weight, key_weight, cos, sin, out, residue, log_sums, scale,
                TOKENS, HEADS, HALF, BQ, BK, REST, SUMS, FLOAT32, False,
            )  # fmt: skip
    else:
        _attend(
            qkv, query_weight, key_weight, cos, sin, out, residue, log_sums, scale,
            TOKENS, HEADS, HALF, BQ, BK, REST, SUMS, FLOAT32, True,
        )  # fmt: skip
