"""What sampling does between the matrix products of a block in 8-bit numbers, as GPU kernels without
gradients.

Plain PyTorch modules compute the same where these kernels do not apply;
``supports_fp8_norm`` and ``supports_fp8_swiglu`` decides. To ``torch.compile`` each kernel is one operator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.ops.adaln import _chunk, _norm_options, _stream, fits_adaln
from driftgen.ops.dispatch import contiguous_rows, power_of_two, supports

__all__ = ["Fp8Activation", "fp8_norm", "fp8_swiglu", "supports_fp8_norm", "supports_fp8_swiglu"]

MOST_WIDTH = 8192
SWIGLU_WARPS = 4
SWIGLU_ROWS = 1


class Fp8Activation(NamedTuple):
    """A tensor ``[..., width]`` as ``fp8.quantize`` rounds its rows: numbers ``[rows, width]``, scales
    ``[rows, 1]``, and the shape and the type that it had.
    """

    rows: Tensor
    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype


def supports_fp8_norm(x: Tensor) -> bool:
    """Whether :func:`fp8_norm` takes this residual stream ``[B, T, h]``: h up to 2048, a multiple
    of 16; without gradient.
    """
    return not torch.is_grad_enabled() and fits_adaln(x)


def fp8_norm(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Fp8Activation]:
    """y = x + gate · branch, or x itself without a branch, and n = y / √(mean y² + 1e-6) · weight · (1 +
    scale) + shift, both rounded to x's type, n then to 8 bits.
    """
    total, eights, scales = _norm_in_eight_bits(x, branch, gate, weight, scale, shift)
    return x if branch is None else total, Fp8Activation(eights, scales, x.shape, x.dtype)


@torch.library.custom_op("driftgen::fp8_norm", mutates_args=())
def _norm_in_eight_bits(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from driftgen.ops.adaln_triton import forward_kernel

    x, scale, shift = _stream(x), contiguous_rows(scale), contiguous_rows(shift)
    batch, tokens, width = x.shape
    eights = x.new_empty(batch * tokens, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(batch * tokens, 1, dtype=torch.float32)
    gated = branch is not None and gate is not None
    total = x.new_empty(x.shape if gated else 0)
    branch, gate = (
        (x, scale) if branch is None or gate is None else (branch.contiguous(), contiguous_rows(gate))
    )
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, weight.contiguous(), scale, shift, total, eights, scales,
            x.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), tokens, chunk,
            GATED=gated, NORMED=True, EIGHT=True, **_norm_options(width),
        )  # fmt: skip
    return total, eights, scales


@_norm_in_eight_bits.register_fake
def _(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = x.shape
    eights = x.new_empty(batch * tokens, width, dtype=torch.float8_e4m3fn)
    total = x.new_empty(0 if branch is None else x.shape)
    return total, eights, x.new_empty(batch * tokens, 1, dtype=torch.float32)


def supports_fp8_swiglu(both: Tensor) -> bool:
    """Whether :func:`fp8_swiglu` takes these rows ``[..., 2 · width]``: width up to 8192, without
    gradient.
    """
    return not torch.is_grad_enabled() and supports(both) and both.shape[-1] <= 2 * MOST_WIDTH


@torch.library.custom_op("driftgen::fp8_swiglu", mutates_args=())
def fp8_swiglu(both: Tensor) -> tuple[Tensor, Tensor]:
    """``fp8.quantize`` of silu(gate) · value, from ``[rows, 2 · width]``: ``[rows, width]`` and the scales
    ``[rows, 1]``.
    """
    from driftgen.ops.fp8_activations_triton import swiglu_kernel

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


@fp8_swiglu.register_fake
def _(both: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = both.shape[0], both.shape[1] // 2
    eights = both.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return eights, both.new_empty(rows, 1, dtype=torch.float32)
