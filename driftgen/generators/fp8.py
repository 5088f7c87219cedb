"""The large matrix products of a DiT in float8, for sampling only: a GPU computes them at twice the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.dit import Block, GELULayer, SwiGLU, modulation
from driftgen.ops.adaln import gated_residual
from driftgen.ops.dispatch import has_hooks
from driftgen.ops.fp8_activations import Fp8Activation, fp8_norm, fp8_swiglu, quantize

__all__ = ["Fp8Block", "Fp8Linear", "Fp8SwiGLU", "check_fp8", "has_fp8", "quantize", "use_fp8"]

DEVICES = {"cuda"}
MIN_CAPABILITY = (8, 9)  # the first with float8 tensor cores
MULTIPLE = 16  # of both sizes of a layer: a requirement of float8 products


def check_fp8(device: str | torch.device | None) -> None:
    """Raise InputError unless the device multiplies float8 matrices."""
    needed = "fp8 needs an NVIDIA GPU of compute capability 8.9 or more (RTX 4090, H100, H200)"
    try:
        place = torch.device(device or "cpu")
        if place.type not in DEVICES:
            raise InputError(f"{needed}, the device is {place}")
        if place.type != "cuda":
            return
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise InputError(f"{needed}, and PyTorch finds none here")
        capability, name = torch.cuda.get_device_capability(place), torch.cuda.get_device_name(place)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={device}: {str(error).splitlines()[0]}") from None
    if capability < MIN_CAPABILITY:
        raise InputError(f"{needed}, {name} has {capability[0]}.{capability[1]}")


def use_fp8(network: nn.Module) -> int:
    """Replace the large layers of DiT blocks in place and return their number: queries, keys and values, the
    output of attention, and the feed-forward layers.

    Modulations, embeddings, norms, attention itself and the final layer stay as they are, as do layers whose
    sizes are not multiples of 16.
    """
    check_fp8(next(network.parameters()).device)
    blocks = [
        (parent, name, child)
        for parent in network.modules()
        for name, child in parent.named_children()
        if isinstance(child, Block)
    ]
    count = 0
    for parent, name, block in blocks:
        count += _replace(block.attention, "qkv", "output")
        if isinstance(block.mlp, GELULayer):
            count += _replace(block.mlp, "0", "2")
        elif isinstance(block.mlp, SwiGLU) and _fits(block.mlp.gate):
            block.mlp = Fp8SwiGLU(block.mlp)
            count += 3
            if isinstance(block.attention.qkv, Fp8Linear):
                setattr(parent, name, Fp8Block(block))
    if not count:
        raise InputError(
            f"fp8: {type(network).__name__} has no layers for it: it replaces layers of DiT blocks whose "
            f"sizes are multiples of {MULTIPLE}"
        )
    return count


def has_fp8(network: nn.Module) -> bool:
    """Return True if the network has float8 layers."""
    return any(isinstance(module, Fp8Linear) for module in network.modules())


class Fp8Linear(nn.Module):
    """y_ij = s_i t_j Σ_k q(x)_ik q(w)_jk + b_j: a linear layer, or several with the same input.

    The weight is quantized once, with a scale t_j per output; the input at each call, with a scale s_i per
    row. y is rounded to bfloat16 and has the dtype of x.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        with torch.no_grad():
            weight, scale = quantize(torch.cat([layer.weight for layer in layers]))
            bias = torch.cat([layer.bias for layer in layers]).bfloat16()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale.t().contiguous())
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor | Fp8Activation) -> Tensor:
        if torch.is_grad_enabled():
            raise InputError("fp8 layers have no gradient: call them under torch.inference_mode()")
        rows = x if isinstance(x, Fp8Activation) else Fp8Activation.quantize(x)
        # Fast accumulation keeps fewer digits than float32, but many more than the 4 of the operands.
        out = torch._scaled_mm(
            rows.rows,
            self.weight.t(),
            rows.scale,
            self.scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # ``.to(dtype)`` must not convert float8 weights and their scales: only the device changes.
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(fn(buffer).device)
        return self


class Fp8SwiGLU(nn.Module):
    """W₃(silu(W₁x) · W₂x), with W₁ and W₂ as one product that quantizes x once."""

    def __init__(self, mlp: SwiGLU) -> None:
        super().__init__()
        self.both, self.output = Fp8Linear(mlp.gate, mlp.value), Fp8Linear(mlp.output)

    def forward(self, x: Tensor | Fp8Activation) -> Tensor:
        out: Tensor = self.output(fp8_swiglu(self.both(x)))
        return out


class Fp8Block(Block):
    """A DiT block whose norms quantize their output for the float8 layers behind them."""

    def __init__(self, block: Block) -> None:
        nn.Module.__init__(self)  # takes over the layers of a block
        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.attention, self.mlp, self.modulation = block.attention, block.mlp, block.modulation

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if has_hooks(self.attention, self.attention.qkv, self.mlp):  # hooks expect plain tensors
            return super().forward(x, condition, cos, sin)
        parts = modulation(self.modulation, condition, 6, x.dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x, normed = fp8_norm(x, None, None, self.attention_norm.weight, scale, shift)
        branch = self.attention(normed, cos, sin)
        x, normed = fp8_norm(x, branch, gate, self.mlp_norm.weight, mlp_scale, mlp_shift)
        return gated_residual(x, self.mlp(normed), mlp_gate)


def _replace(owner: nn.Module, *names: str) -> int:
    count = 0
    for name in names:
        layer = getattr(owner, name)
        if isinstance(layer, nn.Linear) and _fits(layer):
            setattr(owner, name, Fp8Linear(layer))
            count += 1
    return count


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
