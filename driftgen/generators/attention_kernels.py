# mypy: ignore-errors
"""Queries and keys between their linear layer and attention, one GPU kernel each way: RMSNorm of every head,
then the rotary embedding.

A program has the queries or the keys (on the way back, or the values) of some tokens of one sample. A head
lies in its registers as two halves, which the rotation turns into each other.
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
def _turn_back(
    grad, by_head, by_token, x, weight, cos, sin, out, sums, t, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of queries or keys before norm and rotation, and this program's share of the weight's.

    With g the gradient turned back and x̂ = x r: dw = Σ g x̂, dx = r (g w − x̂ mean(g w x̂)).
    """
    width: tl.constexpr = HEADS * 2 * HALF
    wa, wb = _weights(weight, HALF)
    c, s = _angles(cos, sin, t, tokens, HALF)
    inside = (t < tokens)[:, None, None]
    t = t[:, None, None]
    head = tl.arange(0, BH)[None, :, None]
    j = tl.arange(0, HALF)[None, None, :]
    sum_a, sum_b = tl.zeros((BT, BH, HALF), tl.float32), tl.zeros((BT, BH, HALF), tl.float32)
    for first in range(0, HEADS, BH):
        at = t * (3 * width) + (first + head) * (2 * HALF) + j
        a, b = _halves(x + at, inside, HALF)
        da, db = _halves(grad + t * by_token + (first + head) * by_head + j, inside, HALF)
        r = _inverse_norm(a, b, HALF)
        a, b = a * r, b * r
        ga, gb = da * c + db * s, db * c - da * s
        sum_a += ga * a
        sum_b += gb * b
        ga, gb = ga * wa, gb * wb
        mean = tl.sum(ga * a + gb * b, axis=2)[:, :, None] * (0.5 / HALF)
        _store_halves(out + at, r * (ga - a * mean), r * (gb - b * mean), inside, HALF)
    j = tl.arange(0, HALF)
    tl.store(sums + j, tl.sum(tl.reshape(sum_a, (BT * BH, HALF)), axis=0))
    tl.store(sums + HALF + j, tl.sum(tl.reshape(sum_b, (BT * BH, HALF)), axis=0))


@triton.jit
def _put(
    grad, by_head, by_token, out, t, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of the values, in its place."""
    width: tl.constexpr = HEADS * 2 * HALF
    inside = (t < tokens)[:, None, None]
    t = t[:, None, None]
    head = tl.arange(0, BH)[None, :, None]
    j = tl.arange(0, 2 * HALF)[None, None, :]
    for first in range(0, HEADS, BH):
        value = tl.load(grad + t * by_token + (first + head) * by_head + j, mask=inside)
        at = t * (3 * width) + (first + head) * (2 * HALF) + j
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_query, query_by_sample, query_by_head, query_by_token,
    grad_key, key_by_sample, key_by_head, key_by_token,
    grad_value, value_by_sample, value_by_head, value_by_token,
    qkv, query_weight, key_weight, cos, sin, grad_qkv, sums, tokens,
    HEADS: tl.constexpr, HALF: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """The gradient of the linear layer's output, each third by programs of its own; and shares of those of
    the norms' weights, ``sums`` ``[programs, 2, head]``.
    """
    width: tl.constexpr = HEADS * 2 * HALF
    sample, t = _block(tokens, BT)
    start = sample * tokens * 3 * width
    qkv += start
    grad_qkv += start
    sums += tl.program_id(0) * (4 * HALF)
    if tl.program_id(1) == 0:
        _turn_back(
            grad_query + sample * query_by_sample, query_by_head, query_by_token, qkv, query_weight,
            cos, sin, grad_qkv, sums, t, tokens, HEADS, HALF, BT, BH,
        )  # fmt: skip
    elif tl.program_id(1) == 1:
        _turn_back(
            grad_key + sample * key_by_sample, key_by_head, key_by_token, qkv + width, key_weight,
            cos, sin, grad_qkv + width, sums + 2 * HALF, t, tokens, HEADS, HALF, BT, BH,
        )  # fmt: skip
    else:
        grad_value += sample * value_by_sample
        _put(grad_value, value_by_head, value_by_token, grad_qkv + 2 * width, t, tokens, HEADS, HALF, BH)
