"""The large products of a DiT in 8-bit numbers, for sampling alone: a GPU does twice as many of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.dit import Block, MLPLayer, SwiGLU
from driftgen.ops.fp8_activations import Fp8Activation, fp8_swiglu, supports_fp8_swiglu

__all__ = ["Fp8Linear", "Fp8SwiGLU", "check_fp8", "has_fp8", "quantize", "use_fp8"]

DEVICES = {"cuda"}
LEAST_CAPABILITY = (8, 9)  # the first with products of 8-bit numbers
LARGEST = 448.0  # of float8_e4m3fn
MULTIPLE = 16  # such products need sizes that it divides


def check_fp8(device: str | torch.device | None) -> None:
    """Refuses a device without products of 8-bit numbers."""
    needed = "fp8 needs an NVIDIA GPU of compute capability 8.9 or more (RTX 4090, H100, H200)"
    try:
        place = torch.device(device or "cpu")
        if place.type not in DEVICES:
            raise InputError(f"{needed}, the device is {place}")
        if place.type != "cuda":
            return
        if torch.version.cuda is None or not torch.cuda.is_available():
            raise InputError(f"{needed}, and PyTorch finds none here")
        found, name = torch.cuda.get_device_capability(place), torch.cuda.get_device_name(place)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device={device}: {str(error).splitlines()[0]}") from None
    if found < LEAST_CAPABILITY:
        raise InputError(f"{needed}, {name} has {found[0]}.{found[1]}")


def use_fp8(network: nn.Module) -> int:
    """Replaces the large layers of DiT blocks in place and returns how many: queries, keys and values, the
    output of attention, and the feed-forward layers.

    Modulations, embeddings, norms, attention itself and the last layer stay as they are, and so do layers of
    sizes that 16 does not divide.
    """
    check_fp8(next(network.parameters()).device)
    count = 0
    for block in [module for module in network.modules() if isinstance(module, Block)]:
        count += _replace(block.attention, "qkv", "output")
        if isinstance(block.mlp, MLPLayer):
            count += _replace(block.mlp, "0", "2")
        elif isinstance(block.mlp, SwiGLU) and _fits(block.mlp.gate):
            block.mlp = Fp8SwiGLU(block.mlp)
            count += 3
    if not count:
        raise InputError(
            f"fp8: {type(network).__name__} has no layers for it; those of DiT blocks are, "
            f"of sizes that {MULTIPLE} divides"
        )
    return count


def has_fp8(network: nn.Module) -> bool:
    """Whether some layers of a network are 8-bit ones."""
    return any(isinstance(module, Fp8Linear) for module in network.modules())


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row of a matrix in 8 bits, and its scale ``[rows, 1]``: s = max |x| / 448, q = round(x / s).

    Plain operations, so that a compiler joins them to whatever made x.
    """
    x = x.float()
    # A row of zeros has to stay one. x / s may be a last digit of float32 above 448 and still rounds to it.
    # Times 1 / 448, as a GPU divides by a constant: so the numbers are the same everywhere.
    scale = x.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) * (1 / LARGEST)
    return (x * scale.reciprocal()).to(torch.float8_e4m3fn), scale


class Fp8Linear(nn.Module):
    """y_ij = s_i t_j Σ_k q(x)_ik q(w)_jk + b_j: a linear layer, or several of one input side by side.

    The weight is rounded once, with a scale t_j for each output; the input at each call, with a scale s_i
    for each row. y has the number type of x, rounded to bfloat16.
    """

    takes_eight_bits = True
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
        rounded = (x.rows, x.scale) if isinstance(x, Fp8Activation) else quantize(x.reshape(-1, x.shape[-1]))
        out = self.product(*rounded)
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    def product(self, rows: Tensor, scale: Tensor) -> Tensor:
        """The layer of a rounded input ``[rows, in]``, in bfloat16."""
        # Fast sums keep fewer digits than float32 and still many more than the 4 of what is summed.
        return torch._scaled_mm(
            rows,
            self.weight.t(),
            scale,
            self.scale,
            bias=self.bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # ``.to(dtype)`` is about numbers that are computed with as they are; these only move.
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = buffer.to(fn(buffer).device)
        return self


class Fp8SwiGLU(nn.Module):
    """W₃(silu(W₁x) · W₂x) with W₁ and W₂ as one product: x is rounded once."""

    takes_eight_bits = True

    def __init__(self, mlp: SwiGLU) -> None:
        super().__init__()
        self.both, self.output = Fp8Linear(mlp.gate, mlp.value), Fp8Linear(mlp.output)

    def forward(self, x: Tensor | Fp8Activation) -> Tensor:
        both: Tensor = self.both(x)
        if supports_fp8_swiglu(both):
            out = self.output.product(*fp8_swiglu(both.flatten(0, -2)))
            return out.to(x.dtype).reshape(*x.shape[:-1], -1)
        gate, value = both.chunk(2, dim=-1)
        plain: Tensor = self.output(F.silu(gate) * value)
        return plain


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
