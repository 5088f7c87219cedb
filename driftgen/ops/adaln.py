"""Adaptive norms and gated residuals between the branches of a Transformer block (adaLN-zero).

Each function uses Triton kernels with gradients where they apply, see :func:`supports_adaln`, and plain
PyTorch elsewhere. Each kernel is one custom operator to ``torch.compile``.

Shapes: x and branch ``[B, T, h]``; scale, shift and gate ``[B, 1, h]`` in any dtype, rounded to that of x.
``weight`` ``[h]`` is that of an RMSNorm; None stands for a LayerNorm without parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, power_of_two, supports, unit_stride
from driftgen.ops.norms import layer_norm, rms_norm

__all__ = [
    "fits_adaln",
    "gated_norm",
    "gated_residual",
    "modulated_norm",
    "residual_norm",
    "supports_adaln",
]

MAX_WIDTH = 2048
# Tokens per iteration and pipeline stages. On an H200, 512 x 272 x 768, a gated norm takes 0.24 ms forward
# and 0.34 ms backward (3.6 and 3.8 TB/s); without pipelining 0.26 and 0.43 ms.
ROWS, STAGES = 2, 3
PROGRAMS = 2048  # desired number of programs; an H200 runs about 600 at a time
MIN_CHUNK = 8  # tokens per program
REGISTERS = 128  # per thread in the 16-bit backward pass: four programs of four warps fit a multiprocessor


def supports_adaln(x: Tensor) -> bool:
    """Return True if the kernels with gradients take x ``[B, T, h]``: h a multiple of 16, at most 2048.

    Only in grad mode: without gradients compiled PyTorch is as fast.
    """
    return torch.is_grad_enabled() and fits_adaln(x)


def fits_adaln(x: Tensor) -> bool:
    """Return True if the kernels take x, with or without gradients."""
    tokens, width = x.shape[-2:]
    return supports(x) and x.ndim == 3 and width % 16 == 0 and width <= MAX_WIDTH and tokens * width < 2**31


def modulated_norm(x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor) -> Tensor:
    """norm(x) · (1 + scale) + shift, with norm(x) = x / √(mean x² + 1e-6) · weight."""
    if weight is not None and supports_adaln(x):
        return _ModulatedNorm.apply(x, weight, scale, shift)  # type: ignore[no-any-return, no-untyped-call]
    normed = layer_norm(x) if weight is None else rms_norm(x, weight)
    return normed * (1 + scale.to(x.dtype)) + shift.to(x.dtype)


def residual_norm(x: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return x and :func:`modulated_norm` of it, for a residual stream that also feeds a branch.

    Continue with the returned x: its gradient then reaches the kernel, which adds it to that of the norm.
    """
    if weight is not None and supports_adaln(x):
        return _ResidualNorm.apply(x, weight, scale, shift)  # type: ignore[no-any-return, no-untyped-call]
    return x, modulated_norm(x, weight, scale, shift)


def gated_norm(
    x: Tensor, branch: Tensor, gate: Tensor, weight: Tensor | None, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y = x + gate · branch, rounded to the dtype of x, and :func:`modulated_norm` of y."""
    if weight is not None and supports_adaln(x):
        inputs = x, branch, gate, weight, scale, shift
        return _GatedNorm.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]
    y = gated_residual(x, branch, gate)
    return y, modulated_norm(y, weight, scale, shift)


def gated_residual(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    """x + gate · branch."""
    if supports_adaln(x):
        return _GatedResidual.apply(x, branch, gate)  # type: ignore[no-any-return, no-untyped-call]
    return x + gate.to(x.dtype) * branch


# --- gradients ------------------------------------------------------------------------------------------


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, scale)
        ctx.shift_dtype = shift.dtype
        return x, _norm(x, None, None, weight, scale, shift)[1]

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_normed: Tensor) -> tuple[Tensor, ...]:
        x, weight, scale = ctx.saved_tensors
        return _norm_gradients(grad_x, grad_normed, x, weight, scale, ctx.shift_dtype)


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        ctx.shift_dtype = shift.dtype
        normed: Tensor = _norm(x, None, None, weight, scale, shift)[1]
        return normed

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor) -> tuple[Tensor, ...]:
        x, weight, scale = ctx.saved_tensors
        return _norm_gradients(None, grad_normed, x, weight, scale, ctx.shift_dtype)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, normed = _norm(x, branch, gate, weight, scale, shift)
        ctx.save_for_backward(total, weight, scale, branch, gate)
        ctx.shift_dtype = shift.dtype
        return total, normed

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_normed: Tensor) -> tuple[Tensor, ...]:
        total, weight, scale, branch, gate = ctx.saved_tensors
        grad_x, grad_branch, sums = _norm_backward(
            grad_total, grad_normed, total, weight, scale, branch, gate
        )
        modulation = _modulation_gradients(sums, total, weight, scale, ctx.shift_dtype)
        return grad_x, grad_branch, sums[:, 2:].to(gate.dtype), *modulation


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(branch, gate)
        total: Tensor = _residual(x, branch, gate)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, ...]:
        branch, gate = ctx.saved_tensors
        grad_branch, sums = _residual_backward(grad_total, branch, gate)
        return grad_total, grad_branch, sums.to(gate.dtype)


def _norm_gradients(
    grad_x: Tensor | None,
    grad_normed: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, weight, scale and shift."""
    grad_total, _, sums = _norm_backward(grad_x, grad_normed, x, weight, scale, None, None)
    return grad_total, *_modulation_gradients(sums, x, weight, scale, shift_dtype)


def _modulation_gradients(
    sums: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift_dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the gradients of weight, scale and shift from Σ n and Σ n x̂ per sample, ``sums[:, :2]``."""
    grad_shift, products = sums[:, :1], sums[:, 1:2]
    grad_weight = (products * (1 + scale.to(x.dtype).float())).sum((0, 1))
    grad_scale = products * weight.float()
    return grad_weight.to(weight.dtype), grad_scale.to(scale.dtype), grad_shift.to(shift_dtype)


# --- custom operators -----------------------------------------------------------------------------------


def _chunk(batch: int, tokens: int) -> int:
    """Return the tokens per program: each sample is cut into equal parts until there are enough programs."""
    parts = min(-(-PROGRAMS // max(batch, 1)), -(-tokens // MIN_CHUNK))
    return -(-tokens // parts)


def _norm_options(width: int) -> dict[str, int]:
    block = power_of_two(width)
    warps = min(max(block // (32 * VECTOR), 1), 8)
    return {"WIDTH": width, "BLOCK": block, "ROWS": ROWS, "STAGES": STAGES, "num_warps": warps}


def _dense_tokens(x: Tensor) -> Tensor:
    """Return x with contiguous tokens; samples may be strided, as after dropping the first tokens."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@torch.library.custom_op("driftgen::gated_norm", mutates_args=())
def _norm(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """Return x + gate · branch, empty without a branch, and its modulated norm."""
    from driftgen.ops.adaln_triton import forward_kernel

    x, scale, shift = _dense_tokens(x), unit_stride(scale), unit_stride(shift)
    batch, tokens, width = x.shape
    normed = x.new_empty(x.shape)
    if branch is None or gate is None:
        total, branch, gate = x.new_empty(0), x, scale
        gated = False
    else:
        total, branch, gate = x.new_empty(x.shape), branch.contiguous(), unit_stride(gate)
        gated = True
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, weight.contiguous(), scale, shift, total, normed, gate,
            x.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), tokens, chunk,
            GATED=gated, NORMED=True, FP8=False, **_norm_options(width),
        )  # fmt: skip
    return total, normed


@_norm.register_fake
def _(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(0 if branch is None else x.shape), x.new_empty(x.shape)


@torch.library.custom_op("driftgen::gated_norm_backward", mutates_args=())
def _norm_backward(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x and of the branch, empty without one, and the sums over the tokens of each
    sample, ``[B, 2, h]``, with a branch ``[B, 3, h]``.
    """
    from driftgen.ops.adaln_triton import backward_kernel

    total, scale, grad_normed = _dense_tokens(total), unit_stride(scale), grad_normed.contiguous()
    batch, tokens, width = total.shape
    has_grad_total = grad_total is not None
    grad_total = grad_normed if grad_total is None else grad_total.contiguous()
    grad_x = total.new_empty(total.shape)
    if branch is None or gate is None:
        grad_branch, branch, gate = total.new_empty(0), total, scale
        gated = False
    else:
        branch, gate = branch.contiguous(), unit_stride(gate)
        grad_branch = branch.new_empty(branch.shape)
        gated = True
    chunk = _chunk(batch, tokens)
    parts = -(-tokens // chunk)
    sums = total.new_empty(batch, parts, 2 + gated, width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        backward_kernel[(batch * parts,)](
            grad_total, grad_normed, total, branch, gate, weight.contiguous(), scale, grad_x, grad_branch,
            sums, total.stride(0), gate.stride(0), scale.stride(0), tokens, chunk,
            GRAD_TOTAL=has_grad_total, GATED=gated, NORMED=True, **_norm_options(width),
            maxnreg=REGISTERS if total.element_size() == 2 else None,
        )  # fmt: skip
    return grad_x, grad_branch, sums.sum(1)


@_norm_backward.register_fake
def _(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, _, width = total.shape
    grad_branch = total.new_empty(0) if branch is None else branch.new_empty(branch.shape)
    sums = total.new_empty(batch, 2 if branch is None else 3, width, dtype=torch.float32)
    return total.new_empty(total.shape), grad_branch, sums


@torch.library.custom_op("driftgen::gated_residual", mutates_args=())
def _residual(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    from driftgen.ops.adaln_triton import forward_kernel

    x, branch, gate = _dense_tokens(x), branch.contiguous(), unit_stride(gate)
    batch, tokens, width = x.shape
    total = x.new_empty(x.shape)
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, gate, gate, gate, total, total, gate,
            x.stride(0), gate.stride(0), 0, 0, tokens, chunk,
            GATED=True, NORMED=False, FP8=False, **_norm_options(width),
        )  # fmt: skip
    return total


@_residual.register_fake
def _(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("driftgen::gated_residual_backward", mutates_args=())
def _residual_backward(grad_total: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the branch and, in float32, of the gate ``[B, 1, h]``."""
    from driftgen.ops.adaln_triton import backward_kernel

    grad_total, branch, gate = grad_total.contiguous(), branch.contiguous(), unit_stride(gate)
    batch, tokens, width = branch.shape
    grad_branch = branch.new_empty(branch.shape)
    chunk = _chunk(batch, tokens)
    parts = -(-tokens // chunk)
    sums = branch.new_empty(batch, parts, 1, width, dtype=torch.float32)
    with torch.cuda.device_of(branch):
        backward_kernel[(batch * parts,)](
            grad_total, grad_total, grad_total, branch, gate, gate, gate, grad_branch, grad_branch,
            sums, 0, gate.stride(0), 0, tokens, chunk,
            GRAD_TOTAL=True, GATED=True, NORMED=False, **_norm_options(width),
        )  # fmt: skip
    return grad_branch, sums.sum(1)


@_residual_backward.register_fake
def _(grad_total: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, width = branch.shape
    return branch.new_empty(branch.shape), branch.new_empty(batch, 1, width, dtype=torch.float32)
