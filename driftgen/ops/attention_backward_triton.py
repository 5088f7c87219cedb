# mypy: ignore-errors
"""The backward kernel of ``driftgen.ops.attention``.

A program handles one head of one sample and passes over it twice: for the gradients of queries with the
queries as rows of every product, then for the gradients of keys and values with the keys as rows. The
exponentials and their gradients then stay in the registers where the next product reads them. In return
scores are computed twice, seven products instead of five. The other operands are read block by block in a
pipelined loop: addresses of blocks kept in shared memory would occupy registers.

Gradients of scores are rounded to 16 bits for the next product. With FLOAT32 a second product adds what that
rounding lost.
"""

from __future__ import annotations

import triton
import triton.language as tl

from driftgen.ops.attention_triton import (
    EPS,
    concat,
    load_angles,
    load_halves,
    load_rows,
    load_weights,
    norm_rope,
    product,
    store_rows,
)

__all__ = ["attention_backward_kernel"]


@triton.jit
def _load_full_rows(x, start, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """Load like ``load_rows``, from a block without tokens out of range."""
    t = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + t * STRIDE + tl.arange(0, 2 * HALF)[None, :])


@triton.jit
def _per_token(x, start, TOKENS: tl.constexpr, COUNT: tl.constexpr):
    """Load one number per token, 0 out of range, where queries and gradients are 0 too."""
    t = start + tl.arange(0, COUNT)
    return tl.load(x + t, mask=t < TOKENS, other=0.0)


@triton.jit
def _store_halves(a, b, out, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr):
    store_rows(a, out, start, TOKENS, STRIDE)
    store_rows(b, out + a.shape[1], start, TOKENS, STRIDE)


@triton.jit
def _add_rows(total, x):
    """Add the rows of x to those of ``total``, which has LANES rows: one for each row that threads hold."""
    LANES: tl.constexpr = total.shape[0]
    return total + tl.sum(tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1])), axis=0)


@triton.jit
def _norm_rope_backward(
    grad, factor, x, out, weight, totals, cos, sin, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """Store the gradient of queries or keys before norm and rotation to ``out``; return the sums of g x̂ over
    the tokens so far, in halves.

    With g the gradient rotated back and x̂ = x r: dw = Σ g x̂, dx = r (g w − x̂ mean(g w x̂)). ``grad``
    ``[rows, head]`` and the sums still lack ``factor``.
    """
    ROWS: tl.constexpr = grad.shape[0]
    HALF: tl.constexpr = grad.shape[1] // 2
    inside = start + tl.arange(0, ROWS)[:, None] < TOKENS
    a, b = load_halves(x, start, TOKENS, STRIDE, HALF, ROWS)
    c, s = load_angles(cos, sin, start, TOKENS, HALF, ROWS)
    da, db = tl.split(tl.permute(tl.reshape(grad, (ROWS, 2, HALF)), (0, 2, 1)))
    # Rows out of range may hold anything, also infinity.
    da, db = tl.where(inside, da, 0.0), tl.where(inside, db, 0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    r = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] * (0.5 / HALF) + EPS)
    a, b = a * r, b * r
    ga, gb = da * c + db * s, db * c - da * s
    weight_a, weight_b = _add_rows(totals[0], ga * a), _add_rows(totals[1], gb * b)
    wa, wb = load_weights(weight, HALF)
    ga, gb = ga * wa, gb * wb
    mean = tl.sum(ga * a + gb * b, axis=1)[:, None] * (0.5 / HALF)
    r *= factor
    _store_halves(r * (ga - a * mean), r * (gb - b * mean), out, start, TOKENS, STRIDE)
    return weight_a, weight_b


@triton.jit
def _store_weight_sums(totals, factor, out):
    """Store what :func:`_norm_rope_backward` summed."""
    HALF: tl.constexpr = totals[0].shape[1]
    j = tl.arange(0, HALF)
    tl.store(out + j, tl.sum(totals[0], axis=0) * factor)
    tl.store(out + HALF + j, tl.sum(totals[1], axis=0) * factor)


@triton.jit
def _query_gradient(
    query, grad, key, value, grad_query, n, d, scale, first, TOKENS: tl.constexpr, FLOAT32: tl.constexpr
):
    """Add dS k of a block of keys to the gradient of a block of queries."""
    KEYS: tl.constexpr = key.shape[0]
    s = tl.dot(query, tl.trans(key))
    dp = tl.dot(grad, tl.trans(value))
    p = tl.exp2(s * scale - n[:, None])
    if first + KEYS > TOKENS:
        # Scores of keys out of range are meaningless, and their exponentials may be infinite.
        p = tl.where(first + tl.arange(0, KEYS)[None, :] < TOKENS, p, 0.0)
    return product(p * (dp - d[:, None]), key, grad_query, FLOAT32)


@triton.jit
def _key_gradients(key, value, query, grad, grad_key, grad_value, n, d, scale, FLOAT32: tl.constexpr):
    """Add dSᵀ q and Pᵀ dO of a block of queries to the gradients of a block of keys and values."""
    s = tl.dot(key, tl.trans(query))
    dp = tl.dot(value, tl.trans(grad))
    p = tl.exp2(s * scale - n[None, :])
    ds = p * (dp - d[None, :])
    grad_value = product(p, grad, grad_value, FLOAT32)
    return product(ds, query, grad_key, FLOAT32), grad_value


@triton.jit
def attention_backward_kernel(
    grad, out, residue, log_sums, qkv, query_weight, key_weight, cos, sin, grad_qkv, queries, products,
    weight_sums, scale, factor,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    BK: tl.constexpr, KEY_REST: tl.constexpr, BQ: tl.constexpr, QUERY_REST: tl.constexpr,
    FLOAT32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From the gradient dO of ``out`` ``[B, TOKENS, HEADS, 2 · HALF]``, compute that of ``qkv``
    ``[B, TOKENS, 3, HEADS, 2 · HALF]`` and, per program, those of the two norm weights, ``weight_sums``
    ``[B, 2, HEADS, 2 · HALF]``.

    With S = q kᵀ, P = 2^(S scale − log_sums) and D = Σ dO · O of each query (O with its rounding error
    ``residue`` if FLOAT32), stored to ``products`` ``[B, HEADS, TOKENS]``: dv = Pᵀ dO, dS = P (dO vᵀ − D),
    dq = factor · dS k, dk = factor · dSᵀ q, where ``factor`` is 1 / √head and ``scale`` is log₂ e / √head.
    Blocks of ROWS tokens iterate over blocks of BK keys (BQ queries), loaded STAGES − 1 blocks ahead, and a
    last one of KEY_REST (QUERY_REST). LANES rows of a half, in loads of 16 bytes, occupy all threads. Queries
    after norm and rotation go to ``queries`` ``[B, TOKENS, HEADS, 2 · HALF]``.
    """
    HEAD: tl.constexpr = 2 * HALF
    width: tl.constexpr = HEADS * HEAD
    stride: tl.constexpr = 3 * width
    full_keys: tl.constexpr = TOKENS // BK * BK
    full_queries: tl.constexpr = TOKENS // BQ * BQ
    program = tl.program_id(0).to(tl.int64)
    sample = program // HEADS
    head = program % HEADS
    qkv += sample * (TOKENS * stride) + head * HEAD
    grad_qkv += sample * (TOKENS * stride) + head * HEAD
    out += sample * (TOKENS * width) + head * HEAD
    residue += sample * (TOKENS * width) + head * HEAD
    queries += sample * (TOKENS * width) + head * HEAD
    grad += sample * (TOKENS * width) + head * HEAD
    log_sums += program * TOKENS
    products += program * TOKENS
    weight_sums += sample * (2 * width) + head * HEAD
    zero = tl.zeros((LANES, HALF), tl.float32)

    for start in range(0, TOKENS, ROWS):
        a, b = load_halves(qkv + width, start, TOKENS, stride, HALF, ROWS)
        wa, wb = load_weights(key_weight, HALF)
        a, b = norm_rope(a, b, wa, wb, cos, sin, start, TOKENS)
        # Stored where their gradient will be.
        _store_halves(a, b, grad_qkv + width, start, TOKENS, stride)
    # Other threads read these keys.
    tl.debug_barrier()
    totals = (zero, zero)
    for start in range(0, TOKENS, ROWS):
        a, b = load_halves(qkv, start, TOKENS, stride, HALF, ROWS)
        ga, gb = load_halves(grad, start, TOKENS, width, HALF, ROWS)
        oa, ob = load_halves(out, start, TOKENS, width, HALF, ROWS)
        # Loaded in halves and concatenated, the gradients stay in registers. Loaded directly they would go
        # through shared memory, and products would wait for all outstanding loads and stores.
        rows = concat(ga, gb)
        oa, ob = oa.to(tl.float32), ob.to(tl.float32)
        if FLOAT32:
            la, lb = load_halves(residue, start, TOKENS, width, HALF, ROWS)
            oa, ob = oa + la.to(tl.float32), ob + lb.to(tl.float32)
        d = tl.sum(ga.to(tl.float32) * oa + gb.to(tl.float32) * ob, axis=1)
        n = _per_token(log_sums, start, TOKENS, ROWS)
        t = start + tl.arange(0, ROWS)
        tl.store(products + t, d, mask=t < TOKENS)
        wa, wb = load_weights(query_weight, HALF)
        qa, qb = norm_rope(a, b, wa, wb, cos, sin, start, TOKENS)
        _store_halves(qa, qb, queries, start, TOKENS, width)
        query = concat(qa, qb)
        grad_query = tl.zeros((ROWS, HEAD), tl.float32)
        if KEY_REST > 0:  # loaded before the loop, so that the data has arrived after it
            last_key = load_rows(grad_qkv + width, full_keys, TOKENS, stride, HALF, KEY_REST)
            last_value = load_rows(qkv + 2 * width, full_keys, TOKENS, stride, HALF, KEY_REST)
        for first in tl.range(0, full_keys, BK, num_stages=STAGES):
            key = _load_full_rows(grad_qkv + width, first, stride, HALF, BK)
            value = _load_full_rows(qkv + 2 * width, first, stride, HALF, BK)
            grad_query = _query_gradient(query, rows, key, value, grad_query, n, d, scale, 0, TOKENS, FLOAT32)
        if KEY_REST > 0:
            grad_query = _query_gradient(
                query, rows, last_key, last_value, grad_query, n, d, scale, full_keys, TOKENS, FLOAT32
            )
        totals = _norm_rope_backward(
            grad_query, factor, qkv, grad_qkv, query_weight, totals, cos, sin, start, TOKENS, stride
        )
    _store_weight_sums(totals, factor, weight_sums)

    tl.debug_barrier()  # other threads read these queries and D
    totals = (zero, zero)
    for start in range(0, TOKENS, ROWS):
        key = load_rows(grad_qkv + width, start, TOKENS, stride, HALF, ROWS)
        value = load_rows(qkv + 2 * width, start, TOKENS, stride, HALF, ROWS)
        grad_key, grad_value = tl.zeros((ROWS, HEAD), tl.float32), tl.zeros((ROWS, HEAD), tl.float32)
        if QUERY_REST > 0:
            last_query = load_rows(queries, full_queries, TOKENS, width, HALF, QUERY_REST)
            last_grad = load_rows(grad, full_queries, TOKENS, width, HALF, QUERY_REST)
        for first in tl.range(0, full_queries, BQ, num_stages=STAGES):
            query = _load_full_rows(queries, first, width, HALF, BQ)
            g = _load_full_rows(grad, first, width, HALF, BQ)
            j = first + tl.arange(0, BQ)
            grad_key, grad_value = _key_gradients(
                key,
                value,
                query,
                g,
                grad_key,
                grad_value,
                tl.load(log_sums + j),
                tl.load(products + j),
                scale,
                FLOAT32,
            )
        if QUERY_REST > 0:
            grad_key, grad_value = _key_gradients(
                key, value, last_query, last_grad, grad_key, grad_value,
                _per_token(log_sums, full_queries, TOKENS, QUERY_REST),
                _per_token(products, full_queries, TOKENS, QUERY_REST),
                scale, FLOAT32,
            )  # fmt: skip
        store_rows(grad_value, grad_qkv + 2 * width, start, TOKENS, stride)
        totals = _norm_rope_backward(
            grad_key,
            factor,
            qkv + width,
            grad_qkv + width,
            key_weight,
            totals,
            cos,
            sin,
            start,
            TOKENS,
            stride,
        )
    _store_weight_sums(totals, factor, weight_sums + width)
