"""Queries, keys and values from the output of their linear layer, as GPU kernels with gradients.

Plain PyTorch modules compute the same where these kernels do not apply;
``supports_qk_norm_rope`` decides.
To ``torch.compile`` each kernel is one operator. Values are a part of what is given: their gradient
then reaches the kernel, which would otherwise be followed by an addition of its own. The linear layer may owe
its bias the gradient (``linear_and_bias``): the kernel sums it on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, power_of_two, supports

__all__ = ["qk_norm_rope", "supports_qk_norm_rope"]

HEAD_SIZES = (16, 32, 64, 128)
HEADS_AT_A_TIME = 8
WARPS = 4
PROGRAMS = 2048  # on the way back, if there are tokens enough


def supports_qk_norm_rope(x: Tensor, heads: int, parts: int = 3) -> bool:
    """Whether :func:`qk_norm_rope` takes this output ``[B, T, 3 · heads · head]`` of a linear layer, or with
    ``parts`` 1 that of a layer with this input ``[B, T, heads · head]``: heads of 16, 32, 64 or 128, tokens
    of one sample that 32-bit numbers can count in.
    """
    tokens, width = x.shape[-2:]
    head = width // (parts * heads)
    return supports(x) and x.ndim == 3 and head in HEAD_SIZES and tokens * 3 * heads * head < 2**31


def qk_norm_rope(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, heads, T, head]`` from the output of their linear layer.

    With y = x / √(mean x² + 1e-6) · weight of each head of queries and keys, rounded to x's type, and its
    halves (a, b): (a cos − b sin, b cos + a sin). Values are a view of ``qkv``. ``bias``
    ``[3 · heads · head]`` has no part in them, as ``qkv`` has it: its gradient is the sum of that of ``qkv``.
    """
    found: tuple[Tensor, Tensor, Tensor] = _TurnedHeads.apply(  # type: ignore[no-untyped-call]
        qkv, query_weight, key_weight, cos, sin, heads, bias
    )
    return found


class _TurnedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: int,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, query_weight, key_weight, cos, sin, bias)
        query, key = _turn(qkv, query_weight, key_weight, cos, sin, heads)
        value = qkv.unflatten(-1, (3, heads, -1))[:, :, 2]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, key_weight, cos, sin, bias = ctx.saved_tensors
        by_qkv, weights, sums = _turn_back(*gradients, qkv, query_weight, key_weight, cos, sin)
        query, key = weights.unbind()
        by_bias = None if bias is None else sums.to(bias.dtype)
        return by_qkv, query.to(query_weight.dtype), key.to(key_weight.dtype), None, None, None, by_bias


def _head_blocks(tokens: int, heads: int, head: int) -> tuple[int, int]:
    """Tokens and heads that a program has at a time: a vector for each thread."""
    together = min(heads & -heads, HEADS_AT_A_TIME)
    most = max(1, WARPS * 32 * VECTOR // (together * head // 2))
    return min(most, power_of_two(tokens)), together


@torch.library.custom_op("driftgen::qk_norm_rope", mutates_args=())
def _turn(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    from driftgen.ops.qk_norm_rope_triton import forward_kernel

    qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (qkv, query_weight, key_weight, cos, sin)
    )
    batch, tokens, width = qkv.shape
    head = width // (3 * heads)
    bt, bh = _head_blocks(tokens, heads, head)
    query, key = (qkv.new_empty(batch, tokens, heads, head) for _ in range(2))
    with torch.cuda.device_of(qkv):
        forward_kernel[(batch * -(-tokens // bt), 2)](
            qkv, query_weight, key_weight, cos, sin, query, key, tokens,
            HEADS=heads, HALF=head // 2, BT=bt, BH=bh, num_warps=WARPS,
        )  # fmt: skip
    return query, key


@_turn.register_fake
def _(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    shape = batch, tokens, heads, width // (3 * heads)
    return qkv.new_empty(shape), qkv.new_empty(shape)


@torch.library.custom_op("driftgen::turned_heads_backward", mutates_args=())
def _turn_back(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of ``qkv``, those of the two weights, ``[2, head]``, and the sums of the first over all
    tokens, ``[3 · heads · head]``.
    """
    from driftgen.ops.qk_norm_rope_triton import backward_kernel

    qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (qkv, query_weight, key_weight, cos, sin)
    )
    batch, heads, tokens, head = grad_query.shape
    bt, bh = _head_blocks(tokens, heads, head)
    groups = heads // bh
    wanted = min(-(-PROGRAMS // max(3 * groups * batch, 1)), -(-tokens // bt))
    chunk = -(-tokens // (wanted * bt)) * bt
    parts = batch * -(-tokens // chunk)
    grad_qkv = qkv.new_empty(qkv.shape)
    weight_sums = qkv.new_empty(parts * groups, 2, head, dtype=torch.float32)
    sums = qkv.new_empty(parts, 3 * heads * head, dtype=torch.float32)
    incoming: list[Any] = []
    for gradient in (grad_query, grad_key, grad_value):
        dense = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        incoming += [dense, *dense.stride()[:3]]
    with torch.cuda.device_of(qkv):
        backward_kernel[(parts * 3 * groups,)](
            *incoming, qkv, query_weight, key_weight, cos, sin, grad_qkv, weight_sums, sums, tokens, chunk,
            HEADS=heads, HALF=head // 2, BT=bt, BH=bh, num_warps=WARPS,
        )  # fmt: skip
    return grad_qkv, weight_sums.sum(0), sums.sum(0)


@_turn_back.register_fake
def _(
    grad_query: Tensor,
    grad_key: Tensor,
    grad_value: Tensor,
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = qkv.new_empty(2, grad_query.shape[3], dtype=torch.float32)
    return qkv.new_empty(qkv.shape), weights, qkv.new_empty(qkv.shape[2], dtype=torch.float32)
