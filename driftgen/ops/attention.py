"""Multi-head attention from the output of its q, k, v layer, with norm and rotation of queries and keys.

On Hopper GPUs one Triton kernel per direction computes all of it, see :func:`supports_attention`. The forward
pass saves its input, its result and one number per query. Elsewhere PyTorch computes the same. Each kernel is
one custom operator to ``torch.compile``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, power_of_two, supports
from driftgen.ops.norms import layer_norm, rms_norm
from driftgen.ops.rope import rotate

__all__ = ["HeadNorm", "attention", "supports_attention"]

DTYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (32, 64, 128)
MAX_TOKENS = 512
MAX_SHARED = 200 * 2**10  # bytes of shared memory for the keys and values of a head and a block of queries

# Launch options: tile sizes in tokens (forward BQ queries by BK keys; backward ROWS queries by BK keys, then
# ROWS keys by BQ queries), pipeline stages, warps, and the register limit that lets as many programs run at
# once as shared memory allows. On an H200, 512 x 12 heads x 272 tokens x 64: forward 0.57 ms, backward
# 2.50 ms; in float32 0.82 and 3.02 ms. PyTorch (norms, rotation and attention): 0.93 and 2.47 ms, in float32
# 6.1 and 13.0 ms. Tuned by ``benchmarks/tune.py``.
FORWARD: dict[str, Any] = {"BQ": 64, "BK": 64, "num_warps": 4, "maxnreg": 168}
BACKWARD: dict[str, Any] = {"ROWS": 64, "BK": 64, "BQ": 32, "STAGES": 4, "num_warps": 4, "maxnreg": None}


class HeadNorm(NamedTuple):
    """The norm of every query or key ``[head]``: RMSNorm, or LayerNorm if there is a bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize x ``[..., head]``."""
        return rms_norm(x, self.weight) if self.bias is None else layer_norm(x, self.weight, self.bias)


def attention(
    qkv: Tensor,
    heads: int,
    query_norm: HeadNorm | None,
    key_norm: HeadNorm | None,
    rope: tuple[Tensor, Tensor] | None,
    float32: bool = False,
) -> Tensor:
    """softmax(q kᵀ / √head) v, ``[B, T, heads · head]``, from ``qkv`` ``[B, T, 3 · heads · head]``.

    Args:
        qkv: output of the linear layer of queries, keys and values.
        heads: number of heads.
        query_norm: norm of every query; None for no norm.
        key_norm: norm of every key; None for no norm.
        rope: tables (cos, sin) that rotate queries and keys after their norms; None for no rotation.
        float32: round nothing to 16 bits between q, k, v and the result, nor between their gradients. The
            kernel then has errors of about 2⁻¹⁷.
    """
    if rope is not None and _is_rms(query_norm) and _is_rms(key_norm) and supports_attention(qkv, heads):
        assert query_norm is not None
        assert key_norm is not None
        return fused_attention(qkv, query_norm.weight, key_norm.weight, *rope, heads, float32)
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
    q, k = q if query_norm is None else query_norm(q), k if key_norm is None else key_norm(k)
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    if float32:
        with torch.autocast(v.device.type, enabled=False):
            mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(v.dtype)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v)
    return mixed.transpose(1, 2).flatten(2)


def _is_rms(norm: HeadNorm | None) -> bool:
    return norm is not None and norm.bias is None


def supports_attention(qkv: Tensor, heads: int) -> bool:
    """Return True if the kernels take ``qkv`` ``[B, T, 3 · heads · head]``.

    They take 16-bit dtypes, T up to 512 and heads of 32, 64 or 128, if the keys and values of a head and a
    block of queries fit the shared memory of a Hopper multiprocessor.
    """
    tokens, width = qkv.shape[-2:]
    head = width // (3 * heads)
    return (
        supports(qkv)
        and qkv.dtype in DTYPES
        and qkv.ndim == 3
        and tokens <= MAX_TOKENS
        and head in HEAD_SIZES
        and (4 * tokens + 2 * FORWARD["BQ"]) * head <= MAX_SHARED
        and _is_hopper(qkv.device)
    )


def _is_hopper(device: torch.device) -> bool:
    """Return True if tensor cores read operands from shared memory; elsewhere keys and values would fill the
    registers.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


# Evaluated once while torch.compile traces, see ``dispatch.has_kernels_constant``.
_is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fused_attention(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    float32: bool = False,
) -> Tensor:
    """:func:`attention` by the kernels, with the weights of two RMSNorms."""
    inputs = qkv, query_weight, key_weight, cos, sin, heads, float32
    if torch.is_grad_enabled() and any(t.requires_grad for t in (qkv, query_weight, key_weight)):
        return _Attention.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    out: Tensor = _attend(*inputs, False)[0]
    return out


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
        float32: bool,
    ) -> Tensor:
        out: Tensor
        out, residue, log_sums = _attend(qkv, query_weight, key_weight, cos, sin, heads, float32, True)
        ctx.save_for_backward(out, residue, log_sums, qkv, query_weight, key_weight, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query_weight, key_weight = ctx.saved_tensors[4:6]
        grad_qkv, grad_weights = _attend_backward(grad, *ctx.saved_tensors)
        grad_query, grad_key = grad_weights.unbind()
        weights = grad_query.to(query_weight.dtype), grad_key.to(key_weight.dtype)
        return grad_qkv, *weights, None, None, None, None


def _last_tile(tokens: int, block: int) -> int:
    """Return the size of the last, partial tile, 0 if there is none. Tensor cores need at least 16 rows."""
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
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result and, for the backward pass, what rounding it lost (with ``float32``) and
    log₂ Σ 2^(score log₂ e) per query, ``[B, heads, T]``; empty tensors otherwise.
    """
    from driftgen.ops.attention_triton import attention_forward_kernel

    qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (qkv, query_weight, key_weight, cos, sin)
    )
    batch, tokens, width = qkv.shape
    head = width // (3 * heads)
    out, residue, log_sums = _empty_outputs(qkv, heads, float32, for_backward)
    # float16 overflows at 65504: its kernel always subtracts the largest score.
    bounded = qkv.dtype == torch.bfloat16
    options = FORWARD if bounded and head <= 64 else {**FORWARD, "maxnreg": None}
    with torch.cuda.device_of(qkv):
        attention_forward_kernel[(batch * heads,)](
            qkv, query_weight, key_weight, cos, sin, out, residue, log_sums,
            math.log2(math.e) / math.sqrt(head),
            TOKENS=tokens, HEADS=heads, HALF=head // 2, REST=_last_tile(tokens, FORWARD["BK"]),
            SUMS=for_backward, FLOAT32=float32, BOUNDED=bounded, num_stages=1, **options,
        )  # fmt: skip
    return out, residue, log_sums


def _empty_outputs(
    qkv: Tensor, heads: int, float32: bool, for_backward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    out = qkv.new_empty(batch, tokens, width // 3)
    residue = qkv.new_empty(out.shape if float32 and for_backward else (0,))
    log_sums = qkv.new_empty((batch, heads, tokens) if for_backward else (0,), dtype=torch.float32)
    return out, residue, log_sums


@_attend.register_fake
def _(
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    float32: bool,
    for_backward: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_outputs(qkv, heads, float32, for_backward)


@torch.library.custom_op("driftgen::attention_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    out: Tensor,
    residue: Tensor,
    log_sums: Tensor,
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``qkv`` and of the two weights, ``[2, head]`` in float32.

    Nothing is rounded to 16 bits on the way if ``residue`` is not empty.
    """
    from driftgen.ops.attention_backward_triton import attention_backward_kernel

    grad, out, residue, log_sums, qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (grad, out, residue, log_sums, qkv, query_weight, key_weight, cos, sin)
    )
    batch, tokens, width = qkv.shape
    heads = log_sums.shape[1]
    head = width // (3 * heads)
    grad_qkv, queries = qkv.new_empty(qkv.shape), out.new_empty(out.shape)
    products = log_sums.new_empty(log_sums.shape)
    weight_sums = log_sums.new_empty(batch, 2, heads, head)
    factor = 1 / math.sqrt(head)
    lanes = min(BACKWARD["ROWS"], 32 * BACKWARD["num_warps"] * VECTOR // (head // 2))
    with torch.cuda.device_of(qkv):
        attention_backward_kernel[(batch * heads,)](
            grad, out, residue, log_sums, qkv, query_weight, key_weight, cos, sin, grad_qkv, queries,
            products, weight_sums, math.log2(math.e) * factor, factor,
            TOKENS=tokens, HEADS=heads, HALF=head // 2, LANES=lanes,
            KEY_REST=_last_tile(tokens, BACKWARD["BK"]), QUERY_REST=_last_tile(tokens, BACKWARD["BQ"]),
            FLOAT32=residue.numel() > 0, num_stages=1, **BACKWARD,
        )  # fmt: skip
    return grad_qkv, weight_sums.sum((0, 2))


@_attend_backward.register_fake
def _(
    grad: Tensor,
    out: Tensor,
    residue: Tensor,
    log_sums: Tensor,
    qkv: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor]:
    grad_weights = log_sums.new_empty(2, qkv.shape[2] // (3 * log_sums.shape[1]))
    return qkv.new_empty(qkv.shape), grad_weights
