"""What sampling does between the matrix products of a Transformer block, as GPU kernels without gradients.

The modules in PyTorch do the same wherever these do not run; ``covers_attention`` and ``covers_swiglu`` say
where they do. To ``torch.compile`` every kernel is one operator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftgen.devices import power_of_two
from driftgen.generators.shared_ops import has_kernels

__all__ = ["attention", "covers_attention", "covers_swiglu", "swiglu_in_eight_bits"]

TYPES = (torch.bfloat16, torch.float16)
HEAD_SIZES = (32, 64, 128)
MOST_TOKENS = 512
MOST_KEPT = 200 * 2**10  # bytes of shared memory that keys and values of a head, and some queries, may take
MOST_WIDTH = 8192


# Queries and keys at a time, warps of a program, and the registers of a thread that let as many programs run
# at a time as the shared memory has room for. On an H200, 256 x 12 heads x 272 tokens x 64: 0.305 ms; with 64
# keys 0.326, with 256 keys 0.381, with 128 queries 0.360, with any number of registers 0.385.
QUERIES, KEYS, WARPS, REGISTERS = 64, 128, 4, 168
SWIGLU_WARPS = 4
SWIGLU_ROWS = 1


def covers_attention(qkv: Tensor, heads: int, *weights: Tensor) -> bool:
    """Whether :func:`attention` takes this output ``[B, T, 3 · heads · head]`` of a linear layer: 16-bit
    numbers, T up to 512, heads of 32, 64 or 128, keys and values of one that fit the memory of a Hopper GPU's
    multiprocessor; and nothing that wants a gradient.
    """
    tokens, width = qkv.shape[-2:]
    head = width // (3 * heads)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (qkv, *weights)):
        return False
    return (
        has_kernels(qkv)
        and qkv.dtype in TYPES
        and qkv.ndim == 3
        and tokens <= MOST_TOKENS
        and head in HEAD_SIZES
        and (4 * tokens + 2 * QUERIES) * head <= MOST_KEPT
        and _keeps_operands(qkv.device)
    )


def covers_swiglu(both: Tensor) -> bool:
    """Whether :func:`swiglu_in_eight_bits` takes these rows ``[..., 2 · width]``: width up to 8192, without
    gradient.
    """
    return not torch.is_grad_enabled() and has_kernels(both) and both.shape[-1] <= 2 * MOST_WIDTH


def _keeps_operands(device: torch.device) -> bool:
    """Whether products read their operands from shared memory (Hopper); elsewhere keys and values would fill
    the registers.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


_keeps_operands._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see shared_ops


@torch.library.custom_op("driftgen::attention", mutates_args=())
def attention(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> Tensor:
    """softmax(q kᵀ / √head) v, ``[B, T, heads · head]``, with q and k as ``turned_heads`` gives them."""
    from driftgen.generators.sampling_kernels import attention_kernel

    qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (qkv, query_weight, key_weight, cos, sin)
    )
    batch, tokens, width = qkv.shape
    head = width // (3 * heads)
    out = qkv.new_empty(batch, tokens, heads * head)
    # float16 ends at 65504: there the largest score has to be known.
    bounded = qkv.dtype == torch.bfloat16
    rest = tokens % KEYS
    with torch.cuda.device_of(qkv):
        attention_kernel[(batch * heads,)](
            qkv, query_weight, key_weight, cos, sin, out, math.log2(math.e) / math.sqrt(head),
            TOKENS=tokens, HEADS=heads, HALF=head // 2, BQ=QUERIES, BK=KEYS,
            REST=max(16, power_of_two(rest)) if rest else 0, BOUNDED=bounded,
            num_warps=WARPS, num_stages=1, maxnreg=REGISTERS if bounded and head <= 64 else None,
        )  # fmt: skip
    return out


@attention.register_fake
def _(qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    batch, tokens, width = qkv.shape
    return qkv.new_empty(batch, tokens, width // 3)


@torch.library.custom_op("driftgen::swiglu_in_eight_bits", mutates_args=())
def swiglu_in_eight_bits(both: Tensor) -> tuple[Tensor, Tensor]:
    """``fp8.quantize`` of silu(gate) · value, from ``[rows, 2 · width]``: ``[rows, width]`` and the scales
    ``[rows, 1]``.
    """
    from driftgen.generators.sampling_kernels import swiglu_kernel

    both = both.contiguous()
    rows, width = both.shape[0], both.shape[1] // 2
    eights = both.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    scales = both.new_empty(rows, 1, dtype=torch.float32)
    block = power_of_two(width)
    warps = SWIGLU_WARPS if block <= 2048 else 2 * SWIGLU_WARPS
    with torch.cuda.device_of(both):
        swiglu_kernel[(-(-rows // SWIGLU_ROWS),)](
            both, eights, scales, rows, WIDTH=width, BLOCK=block, ROWS=SWIGLU_ROWS, num_warps=warps
        )
    return eights, scales


@swiglu_in_eight_bits.register_fake
def _(both: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = both.shape[0], both.shape[1] // 2
    eights = both.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return eights, both.new_empty(rows, 1, dtype=torch.float32)
