"""What a Transformer block does between its matrix products, as GPU kernels with gradients.

The modules in PyTorch say the same, and do it wherever these kernels do not run; ``covers_heads`` and
``covers_stream`` say where they do. To ``torch.compile`` every kernel is one operator. Two functions return a
tensor that they were given, or a part of it: its gradient then reaches the kernel, which would otherwise be
followed by an addition of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen import devices
from driftgen.devices import power_of_two

__all__ = [
    "covers_heads",
    "covers_stream",
    "gated_norm",
    "gated_residual",
    "has_kernels",
    "modulated_norm",
    "stream_norm",
    "turned_heads",
]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_SIZES = (16, 32, 64, 128)
MOST_WIDTH = 2048
HEADS_AT_A_TIME = 8
VECTOR = 8  # numbers of a thread side by side: 16 bytes of a 16-bit type
HEAD_WARPS = 4
ROWS = 2  # tokens under way at a time, in programs of norms
PROGRAMS = 2048  # of norms, if there are tokens enough: a GPU runs some 600 at a time
LEAST_CHUNK = 8  # tokens of such a program


def covers_heads(qkv: Tensor, heads: int) -> bool:
    """Whether :func:`turned_heads` takes this output ``[B, T, 3 · heads · head]`` of a linear layer: heads of
    16, 32, 64 or 128, tokens of one sample that 32-bit numbers can count in.
    """
    tokens, width = qkv.shape[-2:]
    return (
        has_kernels(qkv) and qkv.ndim == 3 and width // (3 * heads) in HEAD_SIZES and tokens * width < 2**31
    )


def covers_stream(x: Tensor) -> bool:
    """Whether the functions of the residual stream take this one, ``[B, T, h]``: h up to 2048, a multiple of
    16. Only where gradients are wanted: without them PyTorch compiles it as well.
    """
    tokens, width = x.shape[-2:]
    return (
        torch.is_grad_enabled()
        and has_kernels(x)
        and x.ndim == 3
        and width % 16 == 0
        and width <= MOST_WIDTH
        and tokens * width < 2**31
    )


def has_kernels(x: Tensor) -> bool:
    """Whether kernels of our own run on the device of this tensor, and take its numbers."""
    # The first half is there for the compiler, which compiles again when it changes.
    return x.device.type in devices.DEVICES and x.dtype in TYPES and _can_run(x.device)


def _can_run(device: torch.device) -> bool:
    return devices.has_kernels(device)


# The compiler is to ask, not to look inside. ``torch.compiler.assume_constant_result`` says so too, but loads
# the whole compiler, and Triton with it, as soon as this module is imported.
_can_run._dynamo_marked_constant = True  # type: ignore[attr-defined]


def turned_heads(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[B, heads, T, head]`` from the output of their linear layer.

    With y = x / √(mean x² + 1e-6) · weight of each head of queries and keys, rounded to x's type, and its
    halves (a, b): (a cos − b sin, b cos + a sin). Values are a view of ``qkv``.
    """
    found: tuple[Tensor, Tensor, Tensor] = _TurnedHeads.apply(qkv, query_weight, key_weight, cos, sin, heads)  # type: ignore[no-untyped-call]
    return found


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
    x: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """y = x + gate · branch, rounded to x's type, and :func:`modulated_norm` of it."""
    found: tuple[Tensor, Tensor] = _GatedNorm.apply(x, branch, gate, weight, scale, shift)  # type: ignore[no-untyped-call]
    return found


def gated_residual(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    """x + gate · branch."""
    total: Tensor = _GatedResidual.apply(x, branch, gate)  # type: ignore[no-untyped-call]
    return total


# --- gradients ------------------------------------------------------------------------------------------


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(qkv, query_weight, key_weight, cos, sin)
        query, key = _turn(qkv, query_weight, key_weight, cos, sin, heads)
        value = qkv.unflatten(-1, (3, heads, -1))[:, :, 2]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        qkv, query_weight, key_weight, cos, sin = ctx.saved_tensors
        by_qkv, weights = _turn_back(*gradients, qkv, query_weight, key_weight, cos, sin)
        query, key = weights.unbind()
        return by_qkv, query.to(query_weight.dtype), key.to(key_weight.dtype), None, None, None


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
        ctx: Any, x: Tensor, branch: Tensor, gate: Tensor, weight: Tensor, scale: Tensor, shift: Tensor
    ) -> tuple[Tensor, Tensor]:
        total, normed = _norm(x, branch, gate, weight, scale, shift)
        ctx.save_for_backward(total, weight, scale, branch, gate)
        ctx.shift = shift.dtype
        return total, normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        total, weight, scale, branch, gate = ctx.saved_tensors
        by_x, by_branch, sums = _norm_back(*gradients, total, weight, scale, branch, gate)
        by_gate = sums[:, 2:].to(gate.dtype)
        return by_x, by_branch, by_gate, *_modulation_gradients(sums, total, weight, scale, ctx.shift)


class _GatedResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(branch, gate)
        total: Tensor = _residual(x, branch, gate)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        branch, gate = ctx.saved_tensors
        by_branch, by_gate = _residual_back(*gradients, branch, gate)
        return *gradients, by_branch, by_gate.to(gate.dtype)


def _norm_gradients(
    grad_x: Tensor | None, grad_normed: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of x, weight, scale and shift."""
    by_x, _, sums = _norm_back(grad_x, grad_normed, x, weight, scale, None, None)
    return by_x, *_modulation_gradients(sums, x, weight, scale, shift)


def _modulation_gradients(
    sums: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of weight, scale and shift, given Σ n and Σ n x̂ of each sample, ``[B, 2 or 3, h]``."""
    of_shift, products = sums[:, :1], sums[:, 1:2]
    of_weight = (products * (1 + scale.to(x.dtype).float())).sum((0, 1))
    of_scale = products * weight.float()
    return of_weight.to(weight.dtype), of_scale.to(scale.dtype), of_shift.to(shift)


# --- operators ------------------------------------------------------------------------------------------


def _head_blocks(tokens: int, heads: int, head: int) -> tuple[int, int]:
    """Tokens and heads that a program has at a time: a vector for each thread."""
    together = min(heads & -heads, HEADS_AT_A_TIME)
    most = max(1, HEAD_WARPS * 32 * VECTOR // (together * head // 2))
    return min(most, power_of_two(tokens)), together


@torch.library.custom_op("driftgen::turned_heads", mutates_args=())
def _turn(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    from driftgen.generators.attention_kernels import forward_kernel

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
            HEADS=heads, HALF=head // 2, BT=bt, BH=bh, num_warps=HEAD_WARPS,
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
) -> tuple[Tensor, Tensor]:
    """The gradient of ``qkv``, and those of the two weights, ``[2, head]``."""
    from driftgen.generators.attention_kernels import backward_kernel

    qkv, query_weight, key_weight, cos, sin = (
        t.contiguous() for t in (qkv, query_weight, key_weight, cos, sin)
    )
    batch, heads, tokens, head = grad_query.shape
    bt, bh = _head_blocks(tokens, heads, head)
    programs = batch * -(-tokens // bt)
    grad_qkv = qkv.new_empty(qkv.shape)
    sums = qkv.new_empty(programs, 2, head, dtype=torch.float32)
    incoming: list[Any] = []
    for gradient in (grad_query, grad_key, grad_value):
        dense = gradient if gradient.stride(-1) == 1 else gradient.contiguous()
        incoming += [dense, *dense.stride()[:3]]
    with torch.cuda.device_of(qkv):
        backward_kernel[(programs, 3)](
            *incoming, qkv, query_weight, key_weight, cos, sin, grad_qkv, sums, tokens,
            HEADS=heads, HALF=head // 2, BT=bt, BH=bh, num_warps=HEAD_WARPS,
        )  # fmt: skip
    return grad_qkv, sums.sum(0)


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
) -> tuple[Tensor, Tensor]:
    return qkv.new_empty(qkv.shape), qkv.new_empty(2, grad_query.shape[3], dtype=torch.float32)


def _chunk(batch: int, tokens: int) -> int:
    """Tokens of a program: samples are cut into about equal parts until there are programs enough."""
    parts = min(-(-PROGRAMS // max(batch, 1)), -(-tokens // LEAST_CHUNK))
    return -(-tokens // parts)


def _norm_options(width: int) -> dict[str, int]:
    block = power_of_two(width)
    warps = min(max(block // (32 * VECTOR), 1), 8)
    return {"WIDTH": width, "BLOCK": block, "ROWS": ROWS, "num_warps": warps}


def _stream(x: Tensor) -> Tensor:
    """Tokens side by side; samples may lie apart, as those do that lost their first tokens."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _part(modulation: Tensor) -> Tensor:
    return modulation if modulation.stride(-1) == 1 else modulation.contiguous()


@torch.library.custom_op("driftgen::gated_norm", mutates_args=())
def _norm(
    x: Tensor, branch: Tensor | None, gate: Tensor | None, weight: Tensor, scale: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor]:
    """x + gate · branch, or nothing where there is no branch; and its modulated norm."""
    from driftgen.generators.norm_kernels import forward_kernel

    x, scale, shift = _stream(x), _part(scale), _part(shift)
    batch, tokens, width = x.shape
    normed = x.new_empty(x.shape)
    if branch is None or gate is None:
        total, branch, gate = x.new_empty(0), x, scale
        gated = False
    else:
        total, branch, gate = x.new_empty(x.shape), branch.contiguous(), _part(gate)
        gated = True
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, weight.contiguous(), scale, shift, total, normed,
            x.stride(0), gate.stride(0), scale.stride(0), shift.stride(0), tokens, chunk,
            GATED=gated, NORMED=True, **_norm_options(width),
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
    ``[B, 2 or 3, h]``.
    """
    from driftgen.generators.norm_kernels import backward_kernel

    total, scale, grad_normed = _stream(total), _part(scale), grad_normed.contiguous()
    batch, tokens, width = total.shape
    stream = grad_total is not None
    grad_total = grad_normed if grad_total is None else grad_total.contiguous()
    grad_x = total.new_empty(total.shape)
    if branch is None or gate is None:
        grad_branch, branch, gate = total.new_empty(0), total, scale
        gated = False
    else:
        branch, gate = branch.contiguous(), _part(gate)
        grad_branch = branch.new_empty(branch.shape)
        gated = True
    chunk = _chunk(batch, tokens)
    parts = -(-tokens // chunk)
    sums = total.new_empty(batch, parts, 2 + gated, width, dtype=torch.float32)
    with torch.cuda.device_of(total):
        backward_kernel[(batch * parts,)](
            grad_total, grad_normed, total, branch, gate, weight.contiguous(), scale, grad_x, grad_branch,
            sums, total.stride(0), gate.stride(0), scale.stride(0), tokens, chunk,
            STREAM=stream, GATED=gated, NORMED=True, **_norm_options(width),
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
    sums = total.new_empty(batch, 2 if branch is None else 3, width, dtype=torch.float32)
    return total.new_empty(total.shape), grad_branch, sums


@torch.library.custom_op("driftgen::gated_residual", mutates_args=())
def _residual(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    from driftgen.generators.norm_kernels import forward_kernel

    x, branch, gate = _stream(x), branch.contiguous(), _part(gate)
    batch, tokens, width = x.shape
    total = x.new_empty(x.shape)
    chunk = _chunk(batch, tokens)
    with torch.cuda.device_of(x):
        forward_kernel[(batch * -(-tokens // chunk),)](
            x, branch, gate, gate, gate, gate, total, total,
            x.stride(0), gate.stride(0), 0, 0, tokens, chunk,
            GATED=True, NORMED=False, **_norm_options(width),
        )  # fmt: skip
    return total


@_residual.register_fake
def _(x: Tensor, branch: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("driftgen::gated_residual_backward", mutates_args=())
def _residual_back(grad_total: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the branch and of the gate, ``[B, 1, h]``."""
    from driftgen.generators.norm_kernels import backward_kernel

    grad_total, branch, gate = grad_total.contiguous(), branch.contiguous(), _part(gate)
    batch, tokens, width = branch.shape
    grad_branch = branch.new_empty(branch.shape)
    chunk = _chunk(batch, tokens)
    parts = -(-tokens // chunk)
    sums = branch.new_empty(batch, parts, 1, width, dtype=torch.float32)
    with torch.cuda.device_of(branch):
        backward_kernel[(batch * parts,)](
            grad_total, grad_total, grad_total, branch, gate, gate, gate, grad_branch, grad_branch,
            sums, 0, gate.stride(0), 0, tokens, chunk,
            STREAM=True, GATED=True, NORMED=False, **_norm_options(width),
        )  # fmt: skip
    return grad_branch, sums.sum(1)


@_residual_back.register_fake
def _(grad_total: Tensor, branch: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return branch.new_empty(branch.shape), gate.new_empty(gate.shape, dtype=torch.float32)
