# mypy: ignore-errors
"""Queries and keys between their linear layer and attention, one GPU kernel each way: RMSNorm of every head,
then the rotary embedding.

A program has the queries or the keys (on the way back, or the values) of some tokens of one sample; on the
way back only some of the heads, but more tokens, over which it sums. A head lies in its registers as two
halves, which the rotation turns into each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["backward_kernel", "forward_kernel"]

EPS = tl.constexpr(1e-6)


@triton.jit
def _block(tokens, BT: tl.constexpr):
    """The sample of this program, and its tokens ``[BT]``."""
    blocks = (tokens + BT - 1) // BT
    pid = tl.program_id(0)
    return (pid // blocks).to(tl.int64), (pid % blocks) * BT + tl.arange(0, BT)


@triton.jit
def _angles(cos, sin, t, tokens, HALF: tl.constexpr):
    """Cosines and sines of the tokens, for all heads: ``[BT, 1, HALF]`` each."""
    at = t[:, None, None] * HALF + tl.arange(0, HALF)[None, None, :]
    inside = (t < tokens)[:, None, None]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _weights(weight, HALF: tl.constexpr):
    """The two halves of a norm's weight, ``[1, 1, HALF]`` each."""
    j = tl.arange(0, HALF)[None, None, :]
    return tl.load(weight + j).to(tl.float32), tl.load(weight + HALF + j).to(tl.float32)


@triton.jit
def _halves(pointers, inside, HALF: tl.constexpr):
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(pointers + HALF, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_halves(pointers, a, b, inside, HALF: tl.constexpr):
    tl.store(pointers, a.to(pointers.dtype.element_ty), mask=inside)
    tl.store(pointers + HALF, b.to(pointers.dtype.element_ty), mask=inside)


@triton.jit
def _inverse_norm(a, b, HALF: tl.constexpr):
    """1 / √(mean x² + ε) of each head, ``[BT, BH, 1]``."""
    return tl.rsqrt(tl.sum(a * a + b * b, axis=2)[:, :, None] * (0.5 / HALF) + EPS)


@triton.jit
def _turn(
    x, weight, cos, sin, out, t, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Queries or keys of a sample, from ``x`` among the 3 · heads of a token to ``out``."""
    width: tl.constexpr = HEADS * 2 * HALF
    wa, wb = _weights(weight, HALF)
    c, s = _angles(cos, sin, t, tokens, HALF)
    inside = (t < tokens)[:, None, None]
    t = t[:, None, None]
    j = tl.arange(0, BH)[None, :, None] * (2 * HALF) + tl.arange(0, HALF)[None, None, :]
    for first in range(0, width, BH * 2 * HALF):
        a, b = _halves(x + t * (3 * width) + (first + j), inside, HALF)
        r = _inverse_norm(a, b, HALF)
        # The norm's result is rounded, as that of the module is.
        a = (a * r * wa).to(x.dtype.element_ty).to(tl.float32)
        b = (b * r * wb).to(x.dtype.element_ty).to(tl.float32)
        _store_halves(out + t * width + (first + j), a * c - b * s, b * c + a * s, inside, HALF)


@triton.jit
def forward_kernel(
    qkv, query_weight, key_weight, cos, sin, query, key, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Queries (programs 0 on axis 1) and keys (1), ``[B, tokens, heads, head]`` each."""
    width: tl.constexpr = HEADS * 2 * HALF
    sample, t = _block(tokens, BT)
    qkv += sample * tokens * 3 * width
    to = sample * tokens * width
    if tl.program_id(1) == 0:
        _turn(qkv, query_weight, cos, sin, query + to, t, tokens, HEADS, HALF, BH)
    else:
        _turn(qkv + width, key_weight, cos, sin, key + to, t, tokens, HEADS, HALF, BH)


@triton.jit
def _store_sums(sums, total, SIZE: tl.constexpr):
    """Of each head's columns, over the tokens: ``[BT, BH, HALF]`` to ``[BH]`` rows SIZE apart."""
    BH: tl.constexpr = total.shape[1]
    j = tl.arange(0, total.shape[2])[None, :]
    tl.store(sums + tl.arange(0, BH)[:, None] * SIZE + j, tl.sum(total, axis=0))


@triton.jit
def _turn_back(
    grad, by_head, by_token, x, weight, cos, sin, out, weight_sums, sums, start, end,
    STRIDE: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of queries or keys before norm and rotation, and this program's shares of the weight's and
    of its own sums over tokens.

    With g the gradient turned back and x̂ = x r: dw = Σ g x̂, dx = r (g w − x̂ mean(g w x̂)).
    """
    wa, wb = _weights(weight, HALF)
    head = tl.arange(0, BH)[None, :, None]
    j = tl.arange(0, HALF)[None, None, :]
    by_wa, by_wb = tl.zeros((BT, BH, HALF), tl.float32), tl.zeros((BT, BH, HALF), tl.float32)
    sum_a, sum_b = tl.zeros((BT, BH, HALF), tl.float32), tl.zeros((BT, BH, HALF), tl.float32)
    for first in range(start, end, BT):
        t = (first + tl.arange(0, BT))[:, None, None]
        inside = t < end
        # Each head loads them again, from the nearest cache: to hand them on would take a barrier.
        angle = t * HALF + 0 * head + j
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        at = t * STRIDE + head * (2 * HALF) + j
        a, b = _halves(x + at, inside, HALF)
        da, db = _halves(grad + t * by_token + head * by_head + j, inside, HALF)
        r = _inverse_norm(a, b, HALF)
        a, b = a * r, b * r
        ga, gb = da * c + db * s, db * c - da * s
        by_wa += ga * a
        by_wb += gb * b
        ga, gb = ga * wa, gb * wb
        mean = tl.sum(ga * a + gb * b, axis=2)[:, :, None] * (0.5 / HALF)
        da, db = r * (ga - a * mean), r * (gb - b * mean)
        sum_a += da
        sum_b += db
        _store_halves(out + at, da, db, inside, HALF)
    _store_sums(sums, sum_a, 2 * HALF)
    _store_sums(sums + HALF, sum_b, 2 * HALF)
    j = tl.arange(0, HALF)
    tl.store(weight_sums + j, tl.sum(tl.reshape(by_wa, (BT * BH, HALF)), axis=0))
    tl.store(weight_sums + HALF + j, tl.sum(tl.reshape(by_wb, (BT * BH, HALF)), axis=0))


@triton.jit
def _put(
    grad, by_head, by_token, out, sums, start, end,
    STRIDE: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of the values, in its place, and this program's share of its sums over tokens."""
    head = tl.arange(0, BH)[None, :, None]
    j = tl.arange(0, 2 * HALF)[None, None, :]
    total = tl.zeros((BT, BH, 2 * HALF), tl.float32)
    for first in range(start, end, BT):
        t = (first + tl.arange(0, BT))[:, None, None]
        value = tl.load(grad + t * by_token + head * by_head + j, mask=t < end, other=0.0)
        tl.store(out + t * STRIDE + head * (2 * HALF) + j, value.to(out.dtype.element_ty), mask=t < end)
        total += value.to(tl.float32)
    _store_sums(sums, total, 2 * HALF)


@triton.jit
def backward_kernel(
    grad_query, query_by_sample, query_by_head, query_by_token,
    grad_key, key_by_sample, key_by_head, key_by_token,
    grad_value, value_by_sample, value_by_head, value_by_token,
    qkv, query_weight, key_weight, cos, sin, grad_qkv, weight_sums, sums, tokens, chunk,
    HEADS: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of the linear layer's output; shares of those of the norms' weights, ``weight_sums``
    ``[shares, 2, head]``, of which a part of a sample has one for each of its groups of heads; and ``sums``
    of the first over the tokens of each part, ``[parts, 3 · heads · head]``.

    A program has ``chunk`` tokens of a sample, and of their queries, keys or values BH heads.
    """
    width: tl.constexpr = HEADS * 2 * HALF
    groups: tl.constexpr = HEADS // BH
    part = tl.program_id(0) // (3 * groups)
    third = tl.program_id(0) % (3 * groups) // groups
    group = tl.program_id(0) % groups
    parts = (tokens + chunk - 1) // chunk
    sample = (part // parts).to(tl.int64)
    start = part % parts * chunk
    end = tl.minimum(start + chunk, tokens)
    first = group * BH
    # Of the heads of all three, those of this program.
    here = third * width + first * (2 * HALF)
    at = sample * tokens * (3 * width) + here
    qkv += at
    grad_qkv += at
    sums += part.to(tl.int64) * (3 * width) + here
    weight_sums += (part.to(tl.int64) * groups + group) * (4 * HALF) + third * (2 * HALF)
    if third == 0:
        _turn_back(
            grad_query + sample * query_by_sample + first * query_by_head, query_by_head, query_by_token,
            qkv, query_weight, cos, sin, grad_qkv, weight_sums, sums, start, end, 3 * width, HALF, BT, BH,
        )  # fmt: skip
    elif third == 1:
        _turn_back(
            grad_key + sample * key_by_sample + first * key_by_head, key_by_head, key_by_token,
            qkv, key_weight, cos, sin, grad_qkv, weight_sums, sums, start, end, 3 * width, HALF, BT, BH,
        )  # fmt: skip
    else:
        grad_value += sample * value_by_sample + first * value_by_head
        _put(grad_value, value_by_head, value_by_token, grad_qkv, sums, start, end, 3 * width, HALF, BT, BH)
