# mypy: ignore-errors
"""Attention from the output of its linear layer, norm and rotation of queries and keys with it: one kernel
each way.

A program has one head of one sample. Forward it keeps all keys and values in shared memory, and block after
block of queries goes by them.

On the way back it goes through the head twice: for the gradients of queries with the queries as rows of
every product, then for those of keys and values with the keys as rows. So the exponentials and their
gradients are always where the next product reads them, in registers. Scores are made twice instead: seven
products for five. What the rows are multiplied with is read block by block, in a loop, some blocks ahead:
kept in shared memory, each block would need registers of its own for where it lies.

Queries, keys, values and gradients are 16-bit numbers, so that their products are those of float32. What is
computed from them, weights and gradients of scores, is rounded to 16 bits for the next product; in float32,
what that takes away is multiplied too.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["attention_backward_kernel", "attention_forward_kernel"]

EPS = tl.constexpr(1e-6)
SAFE = tl.constexpr(64.0)  # scores in base 2 whose exponentials, and sums of them, float32 and bfloat16 hold


@triton.jit
def _weights(weight, HALF: tl.constexpr):
    """The halves of a norm's weight. Read where they are used: kept, they would fill registers."""
    at = weight + tl.arange(0, HALF)[None, :]
    return tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32)


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
    query, key, most, weight, total, start, scale,
    LARGE: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """2^(scores − most) for some more keys, and their sum added to that of the keys before.

    Where scores can be large, ``most`` is the largest so far, and what was summed before is made to fit it.
    Else it is zero, and the exponentials need not wait for it.
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
def _product(x, y, total, FLOAT32: tl.constexpr):
    """total + x y for x in float32: rounded to the type of y, and in float32 what that took away with it."""
    high = x.to(y.dtype)
    total = tl.dot(high, y, total)
    if FLOAT32:
        total = tl.dot((x - high.to(tl.float32)).to(y.dtype), y, total)
    return total


@triton.jit
def _attend(
    qkv, query_weight, key_weight, cos, sin, out, left, sums, scale,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    REST: tl.constexpr, SUMS: tl.constexpr, FLOAT32: tl.constexpr, LARGE: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = HEADS * 2 * HALF
    stride: tl.constexpr = 3 * width
    full: tl.constexpr = TOKENS // BK
    wa, wb = _weights(key_weight, HALF)
    kept = ()
    for i in tl.static_range(full):
        key = _turned(qkv + width, wa, wb, cos, sin, i * BK, TOKENS, stride, HALF, BK)
        value = _values(qkv + 2 * width, i * BK, TOKENS, stride, HALF, BK)
        kept = kept + (key, value)
    if REST > 0:
        last_key = _turned(qkv + width, wa, wb, cos, sin, full * BK, TOKENS, stride, HALF, REST)
    wa, wb = _weights(query_weight, HALF)
    for start in range(0, TOKENS, BQ):
        query = _turned(qkv, wa, wb, cos, sin, start, TOKENS, stride, HALF, BQ)
        total = tl.zeros((BQ, 2 * HALF), tl.float32)
        weight = tl.zeros((BQ,), tl.float32)
        most = weight - (float("inf") if LARGE else 0.0)
        for i in tl.static_range(full):
            p, most, weight, total = _exponentials(
                query, kept[2 * i], most, weight, total, i * BK, scale, LARGE, TOKENS, BK
            )
            total = _product(p, kept[2 * i + 1], total, FLOAT32)
        if REST > 0:
            p, most, weight, total = _exponentials(
                query, last_key, most, weight, total, full * BK, scale, LARGE, TOKENS, REST
            )
            # Read again each time: kept, a third program would not fit a multiprocessor.
            last_value = _values(qkv + 2 * width, full * BK, TOKENS, stride, HALF, REST)
            total = _product(p, last_value, total, FLOAT32)
        total *= (1.0 / weight)[:, None]
        _put(total, out, start, TOKENS, width)
        if SUMS:
            if FLOAT32:
                _put(total - total.to(out.dtype.element_ty).to(tl.float32), left, start, TOKENS, width)
            t = start + tl.arange(0, BQ)
            tl.store(sums + t, most + tl.log2(weight), mask=t < TOKENS)


@triton.jit
def attention_forward_kernel(
    qkv, query_weight, key_weight, cos, sin, out, left, sums, scale,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    REST: tl.constexpr, SUMS: tl.constexpr, FLOAT32: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """softmax(q kᵀ / √head) v for one head of one sample, from ``qkv`` ``[B, TOKENS, 3, HEADS, 2 · HALF]`` to
    ``out`` ``[B, TOKENS, HEADS, 2 · HALF]``; with SUMS also log₂ Σ 2^(q kᵀ scale) of each query, to ``sums``
    ``[B, HEADS, TOKENS]``, and in float32 what rounding ``out`` took away, to ``left``. ``scale`` is
    log₂ e / √head.

    Keys are normalised and turned once, in blocks of BK and a last one of REST; the compiler keeps them and
    the values in shared memory, as they are the same for all blocks of BQ queries. Where not BOUNDED, the
    largest score is always looked for.
    """
    width: tl.constexpr = HEADS * 2 * HALF
    program = tl.program_id(0).to(tl.int64)
    sample = program // HEADS
    head = program % HEADS
    qkv += sample * (TOKENS * 3 * width) + head * (2 * HALF)
    out += sample * (TOKENS * width) + head * (2 * HALF)
    left += sample * (TOKENS * width) + head * (2 * HALF)
    if SUMS:
        sums += program * TOKENS
    if BOUNDED:
        # |q·k| ≤ |q| |k| ≤ head · max |weight of q| · max |weight of k|. Asked once, around everything: a
        # branch between products makes the compiler wait for every step of them.
        qa, qb = _weights(query_weight, HALF)
        ka, kb = _weights(key_weight, HALF)
        bound = tl.max(tl.maximum(tl.abs(qa), tl.abs(qb))) * tl.max(tl.maximum(tl.abs(ka), tl.abs(kb)))
        if bound * (2 * HALF) * scale > SAFE:
            _attend(
                qkv, query_weight, key_weight, cos, sin, out, left, sums, scale,
                TOKENS, HEADS, HALF, BQ, BK, REST, SUMS, FLOAT32, True,
            )  # fmt: skip
        else:
            _attend(
                qkv, query_weight, key_weight, cos, sin, out, left, sums, scale,
                TOKENS, HEADS, HALF, BQ, BK, REST, SUMS, FLOAT32, False,
            )  # fmt: skip
    else:
        _attend(
            qkv, query_weight, key_weight, cos, sin, out, left, sums, scale,
            TOKENS, HEADS, HALF, BQ, BK, REST, SUMS, FLOAT32, True,
        )  # fmt: skip


@triton.jit
def _full(x, start, STRIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr):
    """As ``_values``, of a block that the tokens fill."""
    t = start + tl.arange(0, ROWS)[:, None]
    return tl.load(x + t * STRIDE + tl.arange(0, 2 * HALF)[None, :])


@triton.jit
def _numbers(x, start, TOKENS: tl.constexpr, COUNT: tl.constexpr):
    """Zero beyond the tokens: with queries and gradients that are zero there, so is all that comes of it."""
    t = start + tl.arange(0, COUNT)
    return tl.load(x + t, mask=t < TOKENS, other=0.0)


@triton.jit
def _put(values, out, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr):
    t = start + tl.arange(0, values.shape[0])[:, None]
    at = out + t * STRIDE + tl.arange(0, values.shape[1])[None, :]
    tl.store(at, values.to(out.dtype.element_ty), mask=t < TOKENS)


@triton.jit
def _put_halves(a, b, out, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr):
    _put(a, out, start, TOKENS, STRIDE)
    _put(b, out + a.shape[1], start, TOKENS, STRIDE)


@triton.jit
def _added(total, x):
    """Sums over rows, all but those of ``total``: as many as threads have a row of their own in."""
    LANES: tl.constexpr = total.shape[0]
    return total + tl.sum(tl.reshape(x, (x.shape[0] // LANES, LANES, x.shape[1])), axis=0)


@triton.jit
def _turned_back(
    grad, factor, x, out, weight, totals, cos, sin, start, TOKENS: tl.constexpr, STRIDE: tl.constexpr
):  # fmt: skip
    """The gradient of queries or keys before norm and rotation, to ``out``; and sums over the tokens so far:
    of g x̂ and of that gradient, each in halves.

    With g the gradient turned back and x̂ = x r: dw = Σ g x̂, dx = r (g w − x̂ mean(g w x̂)). ``grad``
    ``[rows, head]`` still wants its factor, and so does the first sum.
    """
    ROWS: tl.constexpr = grad.shape[0]
    HALF: tl.constexpr = grad.shape[1] // 2
    inside = start + tl.arange(0, ROWS)[:, None] < TOKENS
    a, b = _halves(x, start, TOKENS, STRIDE, HALF, ROWS)
    c, s = _angles(cos, sin, start, TOKENS, HALF, ROWS)
    da, db = tl.split(tl.permute(tl.reshape(grad, (ROWS, 2, HALF)), (0, 2, 1)))
    # Rows of no token may be anything, and infinite.
    da, db = tl.where(inside, da, 0.0), tl.where(inside, db, 0.0)
    a, b = a.to(tl.float32), b.to(tl.float32)
    r = tl.rsqrt(tl.sum(a * a + b * b, axis=1)[:, None] * (0.5 / HALF) + EPS)
    a, b = a * r, b * r
    ga, gb = da * c + db * s, db * c - da * s
    weight_a, weight_b = _added(totals[0], ga * a), _added(totals[1], gb * b)
    wa, wb = _weights(weight, HALF)
    ga, gb = ga * wa, gb * wb
    mean = tl.sum(ga * a + gb * b, axis=1)[:, None] * (0.5 / HALF)
    r *= factor
    ga, gb = r * (ga - a * mean), r * (gb - b * mean)
    _put_halves(ga, gb, out, start, TOKENS, STRIDE)
    return weight_a, weight_b, _added(totals[2], ga), _added(totals[3], gb)


@triton.jit
def _share(totals, factor, of_weight, of_bias):
    """What :func:`_turned_back` has summed, to where a program's shares are."""
    HALF: tl.constexpr = totals[0].shape[1]
    j = tl.arange(0, HALF)
    tl.store(of_weight + j, tl.sum(totals[0], axis=0) * factor)
    tl.store(of_weight + HALF + j, tl.sum(totals[1], axis=0) * factor)
    tl.store(of_bias + j, tl.sum(totals[2], axis=0))
    tl.store(of_bias + HALF + j, tl.sum(totals[3], axis=0))


@triton.jit
def _of_queries(
    query, grad, key, value, of_query, n, d, scale, first, TOKENS: tl.constexpr, FLOAT32: tl.constexpr
):
    """The gradient of a block of queries, dS k, with what some keys add."""
    KEYS: tl.constexpr = key.shape[0]
    s = tl.dot(query, tl.trans(key))
    dp = tl.dot(grad, tl.trans(value))
    p = tl.exp2(s * scale - n[:, None])
    if first + KEYS > TOKENS:
        # No score of such a key is meant, and its exponential may be infinite.
        p = tl.where(first + tl.arange(0, KEYS)[None, :] < TOKENS, p, 0.0)
    return _product(p * (dp - d[:, None]), key, of_query, FLOAT32)


@triton.jit
def _of_keys(key, value, query, grad, of_key, of_value, n, d, scale, FLOAT32: tl.constexpr):
    """The gradients of a block of keys and values, dSᵀ q and Pᵀ dO, with what some queries add."""
    s = tl.dot(key, tl.trans(query))
    dp = tl.dot(value, tl.trans(grad))
    p = tl.exp2(s * scale - n[None, :])
    ds = p * (dp - d[None, :])
    of_value = _product(p, grad, of_value, FLOAT32)
    return _product(ds, query, of_key, FLOAT32), of_value


@triton.jit
def attention_backward_kernel(
    grad, out, left, sums, qkv, query_weight, key_weight, cos, sin, grad_qkv, turned, inner, shares, scale,
    factor,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    BK: tl.constexpr, KEY_REST: tl.constexpr, BQ: tl.constexpr, QUERY_REST: tl.constexpr,
    FLOAT32: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """From the gradient dO of ``out`` ``[B, TOKENS, HEADS, 2 · HALF]``, the one of ``qkv``
    ``[B, TOKENS, 3, HEADS, 2 · HALF]``; and shares of the gradients of the norms' two weights, and of that of
    ``qkv`` summed over the tokens, ``shares`` ``[B, 5, HEADS, 2 · HALF]``.

    With S = q kᵀ, P = 2^(S scale − sums) and D = Σ dO · O of each query (in float32 with what rounding took
    away of O, ``left``), which goes to ``inner`` ``[B, HEADS, TOKENS]``: dv = Pᵀ dO, dS = P (dO vᵀ − D),
    dq = factor · dS k, dk = factor · dSᵀ q, where ``factor`` is 1 / √head and ``scale`` log₂ e times that.
    Blocks of ROWS tokens go by all the others, BK keys (BQ queries) in a block, read STAGES − 1 blocks ahead,
    and KEY_REST (QUERY_REST) in the last. LANES rows of a half, each read in parts of 16 bytes, take all
    threads. Queries after norm and rotation go to ``turned`` ``[B, TOKENS, HEADS, 2 · HALF]``.
    """
    HEAD: tl.constexpr = 2 * HALF
    width: tl.constexpr = HEADS * HEAD
    stride: tl.constexpr = 3 * width
    keys: tl.constexpr = TOKENS // BK * BK
    queries: tl.constexpr = TOKENS // BQ * BQ
    program = tl.program_id(0).to(tl.int64)
    sample = program // HEADS
    head = program % HEADS
    qkv += sample * (TOKENS * stride) + head * HEAD
    grad_qkv += sample * (TOKENS * stride) + head * HEAD
    out += sample * (TOKENS * width) + head * HEAD
    left += sample * (TOKENS * width) + head * HEAD
    turned += sample * (TOKENS * width) + head * HEAD
    grad += sample * (TOKENS * width) + head * HEAD
    sums += program * TOKENS
    inner += program * TOKENS
    shares += sample * (5 * width) + head * HEAD
    zero = tl.zeros((LANES, HALF), tl.float32)

    for start in range(0, TOKENS, ROWS):
        a, b = _halves(qkv + width, start, TOKENS, stride, HALF, ROWS)
        wa, wb = _weights(key_weight, HALF)
        a, b = _turn(a, b, wa, wb, cos, sin, start, TOKENS)
        # In the place where their gradient will be.
        _put_halves(a, b, grad_qkv + width, start, TOKENS, stride)
    # Other threads read what was stored here.
    tl.debug_barrier()
    totals = (zero, zero, zero, zero)
    for start in range(0, TOKENS, ROWS):
        a, b = _halves(qkv, start, TOKENS, stride, HALF, ROWS)
        ga, gb = _halves(grad, start, TOKENS, width, HALF, ROWS)
        oa, ob = _halves(out, start, TOKENS, width, HALF, ROWS)
        # In halves, as the queries: joined, they go to registers. What is only read goes to shared memory,
        # and products would wait for all that is being read and written.
        rows = _joined(ga, gb)
        oa, ob = oa.to(tl.float32), ob.to(tl.float32)
        if FLOAT32:
            la, lb = _halves(left, start, TOKENS, width, HALF, ROWS)
            oa, ob = oa + la.to(tl.float32), ob + lb.to(tl.float32)
        d = tl.sum(ga.to(tl.float32) * oa + gb.to(tl.float32) * ob, axis=1)
        n = _numbers(sums, start, TOKENS, ROWS)
        t = start + tl.arange(0, ROWS)
        tl.store(inner + t, d, mask=t < TOKENS)
        wa, wb = _weights(query_weight, HALF)
        qa, qb = _turn(a, b, wa, wb, cos, sin, start, TOKENS)
        _put_halves(qa, qb, turned, start, TOKENS, width)
        query = _joined(qa, qb)
        of_query = tl.zeros((ROWS, HEAD), tl.float32)
        if KEY_REST > 0:  # asked for before the loop, to be there after it
            last_key = _values(grad_qkv + width, keys, TOKENS, stride, HALF, KEY_REST)
            last_value = _values(qkv + 2 * width, keys, TOKENS, stride, HALF, KEY_REST)
        for first in tl.range(0, keys, BK, num_stages=STAGES):
            key = _full(grad_qkv + width, first, stride, HALF, BK)
            value = _full(qkv + 2 * width, first, stride, HALF, BK)
            of_query = _of_queries(query, rows, key, value, of_query, n, d, scale, 0, TOKENS, FLOAT32)
        if KEY_REST > 0:
            of_query = _of_queries(
                query, rows, last_key, last_value, of_query, n, d, scale, keys, TOKENS, FLOAT32
            )
        totals = _turned_back(
            of_query, factor, qkv, grad_qkv, query_weight, totals, cos, sin, start, TOKENS, stride
        )
    _share(totals, factor, shares, shares + 2 * width)

    tl.debug_barrier()  # as above: queries and D
    totals = (zero, zero, zero, zero)
    of_values = tl.zeros((16, HEAD), tl.float32)
    for start in range(0, TOKENS, ROWS):
        key = _values(grad_qkv + width, start, TOKENS, stride, HALF, ROWS)
        value = _values(qkv + 2 * width, start, TOKENS, stride, HALF, ROWS)
        # Weights of a query sum to one: the gradients of all values to those of all results.
        of_values = _added(of_values, _values(grad, start, TOKENS, width, HALF, ROWS).to(tl.float32))
        of_key, of_value = tl.zeros((ROWS, HEAD), tl.float32), tl.zeros((ROWS, HEAD), tl.float32)
        if QUERY_REST > 0:
            last_query = _values(turned, queries, TOKENS, width, HALF, QUERY_REST)
            last_grad = _values(grad, queries, TOKENS, width, HALF, QUERY_REST)
        for first in tl.range(0, queries, BQ, num_stages=STAGES):
            query = _full(turned, first, width, HALF, BQ)
            g = _full(grad, first, width, HALF, BQ)
            j = first + tl.arange(0, BQ)
            of_key, of_value = _of_keys(
                key, value, query, g, of_key, of_value, tl.load(sums + j), tl.load(inner + j), scale, FLOAT32
            )
        if QUERY_REST > 0:
            of_key, of_value = _of_keys(
                key, value, last_query, last_grad, of_key, of_value,
                _numbers(sums, queries, TOKENS, QUERY_REST), _numbers(inner, queries, TOKENS, QUERY_REST),
                scale, FLOAT32,
            )  # fmt: skip
        _put(of_value, grad_qkv + 2 * width, start, TOKENS, stride)
        totals = _turned_back(
            of_key, factor, qkv + width, grad_qkv + width, key_weight, totals, cos, sin, start, TOKENS, stride
        )
    _share(totals, factor, shares + width, shares + 3 * width)
    tl.store(shares + 4 * width + tl.arange(0, HEAD), tl.sum(of_values, axis=0))
