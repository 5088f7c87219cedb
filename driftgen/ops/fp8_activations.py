"""Activations in float8 between the matrix products of a block, for sampling only.

Each function uses a Triton kernel without gradients where it applies and plain PyTorch elsewhere. Each kernel
is one custom operator to ``torch.compile``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.ops.adaln import _chunk, _dense_tokens, _norm_options, fits_adaln, gated_norm, residual_norm
from driftgen.ops.dispatch import power_of_two, supports, unit_stride

__all__ = ["Fp8Activation", "fp8_norm", "fp8_swiglu", "quantize", "supports_fp8_norm", "supports_fp8_swiglu"]

FP8_MAX = 448.0  # largest finite float8_e4m3fn
MAX_WIDTH = 8192
SWIGLU_WARPS = 4
SWIGLU_ROWS = 1


class Fp8Activation(NamedTuple):
    """A quantized tensor ``[..., width]``: float8 rows ``[rows, width]``, their scales ``[rows, 1]``, and the
    shape and dtype of the tensor.
    """

    rows: Tensor
    scale: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @classmethod
    def quantize(cls, x: Tensor) -> Fp8Activation:
        """Quantize the rows of x ``[..., width]``."""
        return cls(*quantize(x.reshape(-1, x.shape[-1])), x.shape, x.dtype)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a matrix to float8 and return it with its scale ``[rows, 1]``: s = max |x| / 448,
    q = round(x / s).

    Plain operations, which a compiler fuses with those before them.
    """
    x = x.float()
    # The lower bound keeps a row of zeros zero. Where x / s exceeds 448 by rounding, it rounds back to 448.
    # Multiplying by 1 / 448, as GPUs divide by constants, gives the same result on every device.
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) * (1 / FP8_MAX)
    return (x * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def supports_fp8_norm(x: Tensor) -> bool:
    """Return True if the kernel of :func:`fp8_norm` takes x ``[B, T, h]``: h a multiple of 16, at most 2048,
    without gradients.
    """
    return not torch.is_grad_enabled() and fits_adaln(x)


def fp8_norm(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor | Fp8Activation]:
    """Return y = x + gate · branch, or x itself without a branch, and the modulated norm of y in float8.

    The arguments are those of ``driftgen.ops.adaln``. Without the kernel the norm is not quantized: the layer
    that reads it does that.
    """
    if weight is not None and supports_fp8_norm(x):
        total, rows, scales = _norm_fp8(x, branch, gate, weight, scale, shift)
        return x if branch is None else total, Fp8Activation(rows, scales, x.shape, x.dtype)
    if branch is None or gate is None:
        return residual_norm(x, weight, scale, shift)
    return gated_norm(x, branch, gate, weight, scale, shift)


@torch.library.custom_op("driftgen::fp8_norm", mutates_args=())
def _norm_fp8(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from driftgen.ops.adaln_triton import forward_kernel

    x, scale, shift = _dense_tokens(x), unit_stride(scale), unit_stride(shift)
    batch, tokens, width = x.shape
    rows = x.new_empty(batch * tokens, width, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(batch * tokens, 1, dtype=torch.float32)
    gated = branch is not None and gate is not None
    total = x.new_empty(x.shape if gated else 0)
    branch, gate = (x, scale) if branch is None or gate is None else (branch.contiguous(), unit_stride(gate))
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, weight.contiguous(), scale, shift, total, rows, scales,
            x.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), tokens, chunk,
            GATED=gated, NORMED=True, FP8=True, **_norm_options(width),
        )  # fmt: skip
    return total, rows, scales


@_norm_fp8.register_fake
def _(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    batch, tokens, width = x.shape
    rows = x.new_empty(batch * tokens, width, dtype=torch.float8_e4m3fn)
    total = x.new_empty(0 if branch is None else x.shape)
    return total, rows, x.new_empty(batch * tokens, 1, dtype=torch.float32)


def supports_fp8_swiglu(both: Tensor) -> bool:
    """Return True if the kernel of :func:`fp8_swiglu` takes ``[..., 2 · width]``: width at most 8192, without
    gradients.
    """
    return not torch.is_grad_enabled() and supports(both) and both.shape[-1] <= 2 * MAX_WIDTH


def fp8_swiglu(both: Tensor) -> Tensor | Fp8Activation:
    """Return silu(gate) · value in float8, from gate and value side by side ``[..., 2 · width]``.

    Without the kernel the result is not quantized: the layer that reads it does that.
    """
    if supports_fp8_swiglu(both):
        rows, scales = _swiglu_fp8(both.flatten(0, -2))
        return Fp8Activation(rows, scales, torch.Size([*both.shape[:-1], rows.shape[1]]), both.dtype)
    gate, value = both.chunk(2, dim=-1)
    return F.silu(gate) * value


@torch.library.custom_op("driftgen::fp8_swiglu", mutates_args=())
def _swiglu_fp8(both: Tensor) -> tuple[Tensor, Tensor]:
    """Return :func:`quantize` of silu(gate) · value, from ``[rows, 2 · width]``."""
    from driftgen.ops.fp8_activations_triton import swiglu_kernel

    both = both.contiguous()
    count, width = both.shape[0], both.shape[1] // 2
    rows = both.new_empty(count, width, dtype=torch.float8_e4m3fn)
    scales = both.new_empty(count, 1, dtype=torch.float32)
    block = power_of_two(width)
    warps = SWIGLU_WARPS if block <= 2048 else 2 * SWIGLU_WARPS
    with torch.cuda.device_of(both):
        swiglu_kernel[(-(-count // SWIGLU_ROWS),)](
            both, rows, scales, count, WIDTH=width, BLOCK=block, ROWS=SWIGLU_ROWS, num_warps=warps
        )
    return rows, scales


@_swiglu_fp8.register_fake
def _(both: Tensor) -> tuple[Tensor, Tensor]:
    count, width = both.shape[0], both.shape[1] // 2
    rows = both.new_empty(count, width, dtype=torch.float8_e4m3fn)
    return rows, both.new_empty(count, 1, dtype=torch.float32)
