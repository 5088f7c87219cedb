"""Attention from the output of its linear layer, norm and rotation of queries and keys with it, as GPU
kernels with gradients: one each way.

Plain PyTorch modules compute the same where these kernels do not apply;
``supports_attention`` decides.
To ``torch.compile`` each kernel is one operator. Between the two only the layer's output, the
result and a number for each query are kept; without gradients that number is not stored either. The linear
layer may owe its bias the gradient (``linear_and_bias``): the kernel sums it on the way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, power_of_two, supports

__all__ = ["attention", "supports_attention"]

TYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (32, 64, 128)
MOST_TOKENS = 512
MOST_KEPT = 200 * 2**10  # bytes of shared memory: keys and values of a head and a block of queries

# How the kernels are built: blocks of tokens (BQ queries by BK keys; on the way back ROWS queries by BK keys,
# then ROWS keys by BQ queries), blocks read there at a time, warps of a program, and the registers of a
# thread that let as many programs run at a time as the shared memory has room for. On an H200, 512 x 12
# heads x 272 tokens x 64: 0.57 ms, and 2.50 ms back; in float32 0.82 and 3.02 ms (norms, rotation and
# PyTorch's attention: 0.93 and 2.47 ms, in float32 6.1 and 13.0 ms). Others: ``benchmarks/tune.py``.
FORWARD: dict[str, Any] = {"BQ": 64, "BK": 64, "num_warps": 4, "maxnreg": 168}
BACKWARD: dict[str, Any] = {"ROWS": 64, "BK": 64, "BQ": 32, "STAGES": 4, "num_warps": 4, "maxnreg": None}


def supports_attention(qkv: Tensor, heads: int) -> bool:
    """Whether :func:`attention` takes this output ``[B, T, 3 · heads · head]`` of a linear layer: 16-bit
    numbers, T up to 512, heads of 32, 64 or 128, keys and values of one that fit the memory of a Hopper GPU's
    multiprocessor beside a block of queries.
    """
    tokens, width = qkv.shape[-2:]
    head = width // (3 * heads)
    return (
        supports(qkv)
        and qkv.dtype in TYPES
        and qkv.ndim == 3
        and tokens <= MOST_TOKENS
        and head in HEAD_SIZES
        and (4 * tokens + 2 * FORWARD["BQ"]) * head <= MOST_KEPT
        and _keeps_operands(qkv.device)
    )


def attention(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    bias: Tensor | None = None,
    float32: bool = False,
) -> Tensor:
    """softmax(q kᵀ / √head) v, ``[B, T, heads · head]``, with q and k as ``qk_norm_rope`` gives them.

    ``bias`` ``[3 · heads · head]`` has no part in it, as ``qkv`` has it: its gradient is the sum of that of
    ``qkv``. With ``float32`` nothing is rounded to 16 bits between q, k, v and the result, or between the
    gradients of the result and of q, k, v: errors there are about 2⁻¹⁷.
    """
    out: Tensor
    if _wants_gradient(qkv, query_weight, key_weight, bias):
        inputs = qkv, query_weight, key_weight, cos, sin, heads, bias, float32
        out = _Attention.apply(*inputs)  # type: ignore[no-untyped-call]
    else:
        out, *_ = _attend(qkv, query_weight, key_weight, cos, sin, heads, float32, False)
    return out


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _keeps_operands(device: torch.device) -> bool:
    """Whether products read their operands from shared memory (Hopper); elsewhere keys and values would fill
    the registers.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


_keeps_operands._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see dispatch


class _Attention(torch.autograd.Function):
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
        float32: bool,
    ) -> Tensor:
        out: Tensor
        out, left, sums = _attend(qkv, query_weight, key_weight, cos, sin, heads, float32, True)
        ctx.save_for_backward(out, left, sums, qkv, query_weight, key_weight, cos, sin, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bias = ctx.saved_tensors
        query_weight, key_weight = saved[4:6]
        by_qkv, weights, sums = _attend_back(*gradients, *saved)
        query, key = weights.unbind()
        by_bias = None if bias is None else sums.to(bias.dtype)
        weights = query.to(query_weight.dtype), key.to(key_weight.dtype)
        return by_qkv, *weights, None, None, None, by_bias, None


def _rest(tokens: int, block: int) -> int:
    """The last of blocks that the tokens do not fill: a product has 16 rows or columns at least."""
    rest = tokens % block
    return max(16, power_of_two(rest)) if rest else 0


@torch.library.custom_op("driftgen::attention", mutates_args=())
def _attend(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    float32: bool,
    with_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result; and for gradients what rounding took away of it, in float32, and log₂ Σ 2^(score log₂ e) of
    each query, ``[B, heads, T]``; else ``[0]``.
    """
    from driftgen.ops.attention_triton import attention_forward_kernel

    qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (qkv, query_weight, key_weight, cos, sin)
    )
    batch, tokens, width = qkv.shape
    head = width // (3 * heads)
    out, left, sums = _made(qkv, heads, float32, with_sums)
    # float16 ends at 65504: there the largest score has to be known.
    bounded = qkv.dtype == torch.bfloat16
    build = FORWARD if bounded and head <= 64 else {**FORWARD, "maxnreg": None}
    with torch.cuda.device_of(qkv):
        attention_forward_kernel[(batch * heads,)](
            qkv, query_weight, key_weight, cos, sin, out, left, sums, math.log2(math.e) / math.sqrt(head),
            TOKENS=tokens, HEADS=heads, HALF=head // 2, REST=_rest(tokens, FORWARD["BK"]), SUMS=with_sums,
            FLOAT32=float32, BOUNDED=bounded, num_stages=1, **build,
        )  # fmt: skip
    return out, left, sums


def _made(qkv: Tensor, heads: int, float32: bool, with_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    out = qkv.new_empty(batch, tokens, width // 3)
    left = qkv.new_empty(out.shape if float32 and with_sums else (0,))
    sums = qkv.new_empty((batch, heads, tokens) if with_sums else (0,), dtype=torch.float32)
    return out, left, sums


@_attend.register_fake
def _(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    float32: bool,
    with_sums: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _made(qkv, heads, float32, with_sums)


@torch.library.custom_op("driftgen::attention_backward", mutates_args=())
def _attend_back(
    grad: Tensor,
    out: Tensor,
    left: Tensor,
    sums: Tensor,
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of ``qkv``, those of the two weights, ``[2, head]``, and the sums of the first over all
    tokens, ``[3 · heads · head]``; in float32 where the result has something left of its rounding.
    """
    from driftgen.ops.attention_triton import attention_backward_kernel

    grad, out, left, sums, qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (grad, out, left, sums, qkv, query_weight, key_weight, cos, sin)
    )
    batch, tokens, width = qkv.shape
    heads = sums.shape[1]
    head = width // (3 * heads)
    grad_qkv, turned = qkv.new_empty(qkv.shape), out.new_empty(out.shape)
    inner = sums.new_empty(sums.shape)
    shares = sums.new_empty(batch, 5, heads, head)
    factor = 1 / math.sqrt(head)
    lanes = min(BACKWARD["ROWS"], 32 * BACKWARD["num_warps"] * VECTOR // (head // 2))
    with torch.cuda.device_of(qkv):
        attention_backward_kernel[(batch * heads,)](
            grad, out, left, sums, qkv, query_weight, key_weight, cos, sin, grad_qkv, turned, inner, shares,
            math.log2(math.e) * factor, factor, TOKENS=tokens, HEADS=heads, HALF=head // 2, LANES=lanes,
            KEY_REST=_rest(tokens, BACKWARD["BK"]), QUERY_REST=_rest(tokens, BACKWARD["BQ"]),
            FLOAT32=left.numel() > 0, num_stages=1, **BACKWARD,
        )  # fmt: skip
    return grad_qkv, shares[:, :2].sum((0, 2)), shares[:, 2:].sum(0).flatten()


@_attend_back.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    left: Tensor,
    sums: Tensor,
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    width = qkv.shape[2]
    weights = sums.new_empty(2, width // (3 * sums.shape[1]))
    return qkv.new_empty(qkv.shape), weights, sums.new_empty(width)
