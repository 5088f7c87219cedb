"""The residual stream between the branches of a Transformer block, as GPU kernels with gradients.

Plain PyTorch modules compute the same where these kernels do not apply;
``supports_adaln`` decides.
To ``torch.compile`` each kernel is one operator. ``stream_norm`` returns a tensor that it was
given: its gradient then reaches the kernel, which would otherwise be followed by an addition of its own. A
branch may come with the bias that is part of it already, but owed its gradient (``linear_and_bias``): the
kernel sums it where it makes the gradient of the branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen.ops.dispatch import VECTOR, contiguous_rows, power_of_two, supports

__all__ = ["fits_adaln", "gated_norm", "gated_residual", "modulated_norm", "stream_norm", "supports_adaln"]

MOST_WIDTH = 2048
# Tokens at a time, and how often that many are under way. On an H200, 512 x 272 x 768, both ways of a gated
# norm take 0.24 and 0.34 ms, 3.6 and 3.8 TB/s; read when they are needed, 0.26 and 0.43 ms.
ROWS, STAGES = 2, 3
PROGRAMS = 2048  # if there are tokens enough: a GPU runs some 600 at a time
LEAST_CHUNK = 8  # tokens of a program
REGISTERS = 128  # of a thread on the way back, with 16 bits, so that four programs of four warps have room


def supports_adaln(x: Tensor) -> bool:
    """Whether the functions of the residual stream take this one, ``[B, T, h]``: h up to 2048, a multiple of
    16. Only where gradients are wanted: without them PyTorch compiles it as well.
    """
    return torch.is_grad_enabled() and fits_adaln(x)


def fits_adaln(x: Tensor) -> bool:
    """Whether the kernels of the residual stream take it, with or without gradients."""
    tokens, width = x.shape[-2:]
    return supports(x) and x.ndim == 3 and width % 16 == 0 and width <= MOST_WIDTH and tokens * width < 2**31


def stream_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """x itself and :func:`modulated_norm` of it: for a stream that both goes on and is read."""
    found: tuple[Tensor, Tensor] = _StreamNorm.apply(x, weight, scale, shift)  # type: ignore[no-untyped-call]
    return found


def modulated_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """x / √(mean x² + 1e-6) · weight · (1 + scale) + shift.

    Scale, shift and gate are ``[B, 1, h]``, in any type, and rounded to that of x.
    """
    normed: Tensor = _ModulatedNorm.apply(x, weight, scale, shift)  # type: ignore[no-untyped-call]
    return normed


def gated_norm(
    x: Tensor,
    branch: Tensor,
    gate: Tensor,
    weight: Tensor,
    scale: Tensor,
    shift: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y = x + gate · branch, rounded to x's type, and :func:`modulated_norm` of it.

    ``bias`` ``[h]`` has no part in y, as the branch has it: its gradient is the sum of the branch's.
    """
    found: tuple[Tensor, Tensor] = _GatedNorm.apply(x, branch, gate, weight, scale, shift, bias)  # type: ignore[no-untyped-call]
    return found


def gated_residual(x: Tensor, branch: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    """x + gate · branch; ``bias`` as for :func:`gated_norm`."""
    total: Tensor = _GatedResidual.apply(x, branch, gate, bias)  # type: ignore[no-untyped-call]
    return total


# --- gradients ------------------------------------------------------------------------------------------


class _StreamNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, scale)
        ctx.shift = shift.dtype
        return x, _norm(x, None, None, weight, scale, shift)[1]

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_normed: Tensor) -> tuple[Tensor, ...]:
        x, weight, scale = ctx.saved_tensors
        return _norm_gradients(grad_x, grad_normed, x, weight, scale, ctx.shift)


class _ModulatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, scale)
        ctx.shift = shift.dtype
        normed: Tensor = _norm(x, None, None, weight, scale, shift)[1]
        return normed

    @staticmethod
    def backward(ctx: Any, grad_normed: Tensor) -> tuple[Tensor, ...]:
        x, weight, scale = ctx.saved_tensors
        return _norm_gradients(None, grad_normed, x, weight, scale, ctx.shift)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        branch: Tensor,
        gate: Tensor,
        weight: Tensor,
        scale: Tensor,
        shift: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        total, normed = _norm(x, branch, gate, weight, scale, shift)
        ctx.save_for_backward(total, weight, scale, branch, gate, bias)
        ctx.shift = shift.dtype
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total, weight, scale, branch, gate, bias = ctx.saved_tensors
        by_x, by_branch, sums = _norm_back(*gradients, total, weight, scale, branch, gate)
        by_gate, by_bias = _gate_gradients(sums[:, 2:], total, gate, bias)
        modulation = _modulation_gradients(sums, total, weight, scale, ctx.shift)
        return by_x, by_branch, by_gate, *modulation, by_bias


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, gate: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(branch, gate, bias)
        total: Tensor = _residual(x, branch, gate)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        branch, gate, bias = ctx.saved_tensors
        by_branch, sums = _residual_back(*gradients, branch, gate)
        return *gradients, by_branch, *_gate_gradients(sums, gradients[0], gate, bias)


def _norm_gradients(
    grad_x: Tensor | None, grad_normed: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of x, weight, scale and shift."""
    by_x, _, sums = _norm_back(grad_x, grad_normed, x, weight, scale, None, None)
    return by_x, *_modulation_gradients(sums, x, weight, scale, shift)


def _modulation_gradients(
    sums: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of weight, scale and shift, given Σ n and Σ n x̂ of each sample, ``[B, 2 or 4, h]``."""
    of_shift, products = sums[:, :1], sums[:, 1:2]
    of_weight = (products * (1 + scale.to(x.dtype).float())).sum((0, 1))
    of_scale = products * weight.float()
    return of_weight.to(weight.dtype), of_scale.to(scale.dtype), of_shift.to(shift)


def _gate_gradients(
    sums: Tensor, stream: Tensor, gate: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of gate and bias, given Σ d · branch and Σ d of each sample, ``[B, 2, h]``: that of the
    branch is gate · d.
    """
    of_gate, of_total = sums[:, :1].to(gate.dtype), sums[:, 1:]
    if bias is None:
        return of_gate, None
    return of_gate, (gate.to(stream.dtype).float() * of_total).sum((0, 1)).to(bias.dtype)


# --- operators ------------------------------------------------------------------------------------------


def _chunk(batch: int, tokens: int) -> int:
    """Tokens of a program: samples are cut into about equal parts until there are programs enough."""
    parts = min(-(-PROGRAMS // max(batch, 1)), -(-tokens // LEAST_CHUNK))
    return -(-tokens // parts)


def _norm_options(width: int) -> dict[str, int]:
    block = power_of_two(width)
    warps = min(max(block // (32 * VECTOR), 1), 8)
    return {"WIDTH": width, "BLOCK": block, "ROWS": ROWS, "STAGES": STAGES, "num_warps": warps}


def _stream(x: Tensor) -> Tensor:
    """Tokens side by side; samples may lie apart, as those do that lost their first tokens."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@torch.library.custom_op("driftgen::gated_norm", mutates_args=())
def _norm(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """x + gate · branch, or nothing where there is no branch; and its modulated norm."""
    from driftgen.ops.adaln_triton import forward_kernel

    x, scale, shift = _stream(x), contiguous_rows(scale), contiguous_rows(shift)
    batch, tokens, width = x.shape
    normed = x.new_empty(x.shape)
    if branch is None or gate is None:
        total, branch, gate = x.new_empty(0), x, scale
        gated = False
    else:
        total, branch, gate = x.new_empty(x.shape), branch.contiguous(), contiguous_rows(gate)
        gated = True
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, weight.contiguous(), scale, shift, total, normed, gate,
            x.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), tokens, chunk,
            GATED=gated, NORMED=True, EIGHT=False, **_norm_options(width),
        )  # fmt: skip
    return total, normed


@_norm.register_fake
def _(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(0 if branch is None else x.shape), x.new_empty(x.shape)


@torch.library.custom_op("driftgen::gated_norm_backward", mutates_args=())
def _norm_back(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    branch: Tensor | None,
    gate: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the branch, if there is one; and the sums over each sample's tokens,
    ``[B, 2 or 4, h]``.
    """
    from driftgen.ops.adaln_triton import backward_kernel

    total, scale, grad_normed = _stream(total), contiguous_rows(scale), grad_normed.contiguous()
    batch, tokens, width = total.shape
    stream = grad_total is not None
    grad_total = grad_normed if grad_total is None else grad_total.contiguous()
    grad_x = total.new_empty(total.shape)
    if branch is None or gate is None:
        grad_branch, branch, gate = total.new_empty(0), total, scale
        gated = False
    else:
        branch, gate = branch.contiguous(), contiguous_rows(gate)
        grad_branch = branch.new_empty(branch.shape)
        gated = True
    chunk = _chunk(batch, tokens)
    parts = -(-tokens // chunk)
    sums = total.new_empty(batch, parts, 2 + 2 * gated, width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        backward_kernel[(batch * parts,)](
            grad_total, grad_normed, total, branch, gate, weight.contiguous(), scale, grad_x, grad_branch,
            sums, total.stride(0), gate.stride(0), scale.stride(0), tokens, chunk,
            STREAM=stream, GATED=gated, NORMED=True, **_norm_options(width),
            maxnreg=REGISTERS if total.element_size() == 2 else None,
        )  # fmt: skip
    return grad_x, grad_branch, sums.sum(1)


@_norm_back.register_fake
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
    sums = total.new_empty(batch, 2 if branch is None else 4, width, dtype=torch.float32)
    return total.new_empty(total.shape), grad_branch, sums


@torch.library.custom_op("driftgen::gated_residual", mutates_args=())
def _residual(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    from driftgen.ops.adaln_triton import forward_kernel

    x, branch, gate = _stream(x), branch.contiguous(), contiguous_rows(gate)
    batch, tokens, width = x.shape
    total = x.new_empty(x.shape)
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, gate, gate, gate, total, total, gate,
            x.stride(0), gate.stride(0), 0, 0, tokens, chunk,
            GATED=True, NORMED=False, EIGHT=False, **_norm_options(width),
        )  # fmt: skip
    return total


@_residual.register_fake
def _(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("driftgen::gated_residual_backward", mutates_args=())
def _residual_back(grad_total: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the branch, and the sums over each sample's tokens, ``[B, 2, h]``."""
    from driftgen.ops.adaln_triton import backward_kernel

    grad_total, branch, gate = grad_total.contiguous(), branch.contiguous(), contiguous_rows(gate)
    batch, tokens, width = branch.shape
    grad_branch = branch.new_empty(branch.shape)
    chunk = _chunk(batch, tokens)
    parts = -(-tokens // chunk)
    sums = branch.new_empty(batch, parts, 2, width, dtype=torch.float32)
    with torch.cuda.device_of(branch):
        backward_kernel[(batch * parts,)](
            grad_total, grad_total, grad_total, branch, gate, gate, gate, grad_branch, grad_branch,
            sums, 0, gate.stride(0), 0, tokens, chunk,
            STREAM=True, GATED=True, NORMED=False, **_norm_options(width),
        )  # fmt: skip
    return grad_branch, sums.sum(1)


@_residual_back.register_fake
def _(grad_total: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    batch, _, width = branch.shape
    return branch.new_empty(branch.shape), branch.new_empty(batch, 2, width, dtype=torch.float32)
