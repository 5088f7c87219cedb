"""DiT: the paper's generator, a Transformer from noise, label and guidance strength to a sample (appendix
"Generator Architecture")."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from driftgen.errors import InputError, OptionError, unknown_name
from driftgen.generators.base import check_noise
from driftgen.generators.conditioning import Conditioning, ImageGenerator, RMSNorm, float32_linear
from driftgen.generators.option_checks import check_sizes, check_types
from driftgen.ops.adaln import gated_norm, gated_residual, modulated_norm, residual_norm
from driftgen.ops.attention import HeadNorm, attention
from driftgen.ops.compile import compile_blocks
from driftgen.ops.fp8_activations import Fp8Activation
from driftgen.ops.norms import EPSILON
from driftgen.ops.rope import cached_rope_tables
from driftgen.ops.swiglu import swiglu
from driftgen.support.checked_arguments import checked

__all__ = ["DiT", "DiTConfig"]

NORMS, QK_NORMS, MLPS = ("rms", "layer"), ("rms", "layer", "none"), ("swiglu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class DiTConfig:
    """Options of a :class:`DiT`. The defaults are the paper's B/2 for 32×32×4 latents.

    Attributes:
        input_size: side of the samples.
        in_channels: channels of the samples.
        patch_size: side of a patch, which becomes one token; divides input_size.
        hidden_size: width of a token; a multiple of 4.
        depth: number of blocks.
        num_heads: attention heads; divides hidden_size into heads of even width.
        mlp_ratio: width of the feed-forward layer, relative to hidden_size; SwiGLU has two thirds of it.
        num_classes: number of classes.
        context_tokens: in-context conditioning tokens, ahead of the image tokens.
        style_codebooks: number of style codebooks; 0 for no style input.
        style_entries: entries of each codebook.
        norm: norm of blocks and final layer: rms, or layer without parameters.
        qk_norm: norm of queries and keys: rms, layer with parameters, or none.
        mlp: feed-forward layer: swiglu, gelu, or gelu_tanh with its tanh approximation.
        rope: rotary position embedding of queries and keys.
        condition_size: width of the condition vector; hidden_size if None.
        attention_float32: attention in float32, whatever dtype the rest has.
    """

    input_size: int = 32
    in_channels: int = 4
    patch_size: int = 2
    hidden_size: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    context_tokens: int = 16
    style_codebooks: int = 32
    style_entries: int = 64
    norm: str = "rms"
    qk_norm: str = "rms"
    mlp: str = "swiglu"
    rope: bool = True
    condition_size: int | None = None
    attention_float32: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, {"context_tokens": 0, "style_codebooks": 0})
        for name, known in (("norm", NORMS), ("qk_norm", QK_NORMS), ("mlp", MLPS)):
            if getattr(self, name) not in known:
                raise unknown_name(name, getattr(self, name), known)
        if int(self.hidden_size * self.mlp_ratio) < 1:
            raise InputError(f"mlp_ratio={self.mlp_ratio} is too small: the paper has 4")
        problems = []
        if self.input_size % self.patch_size:
            problems.append(f"patch_size={self.patch_size} does not divide input_size={self.input_size}")
        if self.hidden_size % 4:
            problems.append(f"hidden_size={self.hidden_size} must be a multiple of 4")
        if self.hidden_size % (2 * self.num_heads):
            problems.append(
                f"num_heads={self.num_heads} must divide hidden_size={self.hidden_size} into even heads"
            )
        if problems:
            raise OptionError("; ".join(problems), self._fitting())

    def _fitting(self) -> dict[str, Any]:
        """Return the options to change, with the values closest to the given ones that fit together."""
        hidden = math.ceil(self.hidden_size / 4) * 4
        fitting = {
            "patch_size": max(n for n in _divisors(self.input_size) if n <= self.patch_size),
            "hidden_size": hidden,
            "num_heads": min(_divisors(hidden // 2), key=lambda n: abs(n - self.num_heads)),
        }
        return {name: value for name, value in fitting.items() if value != getattr(self, name)}

    @property
    def tokens(self) -> int:
        """Number of image tokens."""
        return (self.input_size // self.patch_size) ** 2

    @property
    def condition_width(self) -> int:
        """Width of the condition vector."""
        return self.condition_size or self.hidden_size

    @property
    def mlp_size(self) -> int:
        """Width of the feed-forward layer. SwiGLU has two thirds of it, rounded up to a multiple of 32."""
        width = int(self.hidden_size * self.mlp_ratio)
        return math.ceil(int(width * 2 / 3) / 32) * 32 if self.mlp == "swiglu" else width


_LARGE = {"hidden_size": 1024, "depth": 24, "num_heads": 16}
_PIXEL = {"input_size": 256, "in_channels": 3, "patch_size": 16, "attention_float32": True}
_SMALL = {"in_channels": 3, "hidden_size": 384, "depth": 12, "num_heads": 6, "num_classes": 10}
PRESETS: dict[str, dict[str, Any]] = {
    "B/2": {},
    "L/2": {**_LARGE},
    "B/16": {**_PIXEL},
    "L/16": {**_PIXEL, **_LARGE},
    # For images of 32 and 64 pixels, with 256 tokens as in the paper.
    "S/2-32px": {**_SMALL, "input_size": 32, "patch_size": 2},
    "S/4-64px": {**_SMALL, "input_size": 64, "patch_size": 4},
}


class DiT(ImageGenerator):
    """x = f(ε, c, α): map noise ``[B, C, H, W]`` to samples of the same shape in one call.

    Args:
        config: the options; the defaults of :class:`DiTConfig` if None.
        checkpoint_blocks: recompute each block in the backward pass instead of storing its activations.
        options: fields of :class:`DiTConfig` that replace those of ``config``.
    """

    config: DiTConfig
    # Older files hold these without in-context tokens too, where nothing reads them.
    obsolete_weights = ("context", "context_projection.weight", "context_projection.bias")

    @checked
    def __init__(
        self, config: DiTConfig | None = None, *, checkpoint_blocks: bool = False, **options: Any
    ) -> None:
        super().__init__()
        options = _current_options(options)
        for option in options:
            if option not in DiTConfig.__dataclass_fields__:
                raise unknown_name("option", option, DiTConfig.__dataclass_fields__)
        c = self.config = replace(config or DiTConfig(), **options)
        self.checkpoint_blocks = checkpoint_blocks
        h, patch = c.hidden_size, c.patch_size**2 * c.in_channels
        self.conditioning = Conditioning(c.num_classes, c.style_codebooks, c.style_entries, c.condition_width)
        self.patch_embedding = nn.Linear(patch, h)
        if c.context_tokens:
            self.context_projection = nn.Linear(c.condition_width, h)
            self.context = nn.Parameter(torch.empty(1, c.context_tokens, h))
        self.positions = nn.Parameter(torch.empty(1, c.tokens, h))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.final = Final(c, patch)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, *, checkpoint_blocks: bool = False, **options: Any) -> DiT:
        """Build the paper's B/2 or L/2 (latents), B/16 or L/16 (pixels), or a small model for images of 32 or
        64 pixels.
        """
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(checkpoint_blocks=checkpoint_blocks, **{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize linear layers Xavier-uniform with zero biases, embeddings with standard deviation 0.02,
        and modulations and the output layer with zeros.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        if self.config.context_tokens:
            nn.init.normal_(self.context, std=0.02)
        side = self.config.input_size // self.config.patch_size
        with torch.no_grad():
            self.positions.copy_(sincos_positions(self.config.hidden_size, side))
        for block in self.blocks:
            nn.init.zeros_(block.modulation.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(self.final.modulation.weight)
        nn.init.zeros_(self.final.output.weight)

    def compile_parts(self) -> None:
        """Compile the blocks, which share one compiled form, the final layer and the conditioning."""
        compile_blocks(self, Block, Final, Conditioning)

    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Return samples for Gaussian noise ``[B, C, H, W]`` and condition vectors."""
        c = self.config
        check_noise(gaussian, self.sample_shape)
        x = self.patch_embedding(patchify(gaussian.to(self.positions.dtype), c.patch_size))
        x = x + self.positions.to(x.dtype)
        if c.context_tokens:
            context = self.context_projection(condition)[:, None] + self.context
            x = torch.cat([context.to(x.dtype), x], dim=1)
        activated = F.silu(condition)
        # No buffers: ``.bfloat16()`` would round them.
        cos, sin = cached_rope_tables(x.shape[1], c.hidden_size // c.num_heads, x.device)
        for block in self.blocks:
            if self.checkpoint_blocks and torch.is_grad_enabled():
                x = checkpoint(block, x, activated, cos, sin, use_reentrant=False)
            else:
                x = block(x, activated, cos, sin)
        x = self.final(x[:, c.context_tokens :], activated)
        return unpatchify(x, c.patch_size, c.in_channels)


class Block(nn.Module):
    """Attention and feed-forward, each behind a modulated norm and a gate (adaLN-zero)."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        h = c.hidden_size
        self.attention_norm, self.mlp_norm = _norm(c), _norm(c)
        self.attention = Attention(c)
        self.mlp: nn.Module = SwiGLU(h, c.mlp_size) if c.mlp == "swiglu" else GELULayer(h, c.mlp_size, c.mlp)
        self.modulation = nn.Linear(c.condition_width, 6 * h)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = modulation(self.modulation, condition, 6, x.dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
        x, normed = residual_norm(x, self.attention_norm.weight, scale, shift)
        branch = self.attention(normed, cos, sin)
        x, normed = gated_norm(x, branch, gate, self.mlp_norm.weight, mlp_scale, mlp_shift)
        return gated_residual(x, self.mlp(normed), mlp_gate)


class Attention(nn.Module):
    """Self-attention over all tokens, with norms and rotary positions on queries and keys."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        h, head = c.hidden_size, c.hidden_size // c.num_heads
        self.num_heads, self.rope, self.float32 = c.num_heads, c.rope, c.attention_float32
        self.qkv, self.output = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.query_norm, self.key_norm = _head_norm(c.qk_norm, head), _head_norm(c.qk_norm, head)

    def forward(self, x: Tensor | Fp8Activation, cos: Tensor, sin: Tensor) -> Tensor:
        norms = _norm_parameters(self.query_norm), _norm_parameters(self.key_norm)
        rope = (cos, sin) if self.rope else None
        out: Tensor = self.output(attention(self.qkv(x), self.num_heads, *norms, rope, self.float32))
        return out


class SwiGLU(nn.Module):
    """W₃(silu(W₁x) · W₂x)."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(hidden_size, mlp_size), nn.Linear(hidden_size, mlp_size)
        self.output = nn.Linear(mlp_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return swiglu(x, self.gate, self.value, self.output)


class GELULayer(nn.Sequential):
    """W₂ gelu(W₁x), with the exact GELU or its tanh approximation."""

    def __init__(self, hidden_size: int, mlp_size: int, activation: str = "gelu") -> None:
        gelu = nn.GELU(approximate="tanh" if activation == "gelu_tanh" else "none")
        super().__init__(nn.Linear(hidden_size, mlp_size), gelu, nn.Linear(mlp_size, hidden_size))


class Final(nn.Module):
    """Modulated norm and the projection to the pixels of a patch. Both start at zero."""

    def __init__(self, c: DiTConfig, patch: int) -> None:
        super().__init__()
        self.norm = _norm(c)
        self.modulation = nn.Linear(c.condition_width, 2 * c.hidden_size)
        self.output = nn.Linear(c.hidden_size, patch)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = modulation(self.modulation, condition, 2, x.dtype)
        out: Tensor = self.output(modulated_norm(x, self.norm.weight, scale, shift))
        return out


class PlainNorm(nn.Module):
    """LayerNorm without parameters, as ``driftgen.ops.adaln`` computes it; the modulation has them."""

    weight: None = None


def _norm(c: DiTConfig) -> RMSNorm | PlainNorm:
    return RMSNorm(c.hidden_size) if c.norm == "rms" else PlainNorm()


def _head_norm(kind: str, head: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    return RMSNorm(head) if kind == "rms" else nn.LayerNorm(head, eps=EPSILON)


def _norm_parameters(norm: nn.Module) -> HeadNorm | None:
    if isinstance(norm, nn.LayerNorm):
        return HeadNorm(norm.weight, norm.bias)
    return HeadNorm(norm.weight) if isinstance(norm, RMSNorm) else None


def modulation(layer: nn.Linear, condition: Tensor, parts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return shifts, scales and gates ``[B, 1, h]`` for a residual stream of ``dtype``, which rounds them."""
    if not torch.is_grad_enabled() and condition.dtype == layer.weight.dtype == dtype:
        # A product of 16-bit tensors accumulates in float32 and rounds once: the same result, and faster.
        with torch.autocast(condition.device.type, enabled=False):
            values = layer(condition)
    else:
        values = float32_linear(layer, condition)
    return values[:, None].chunk(parts, dim=-1)  # type: ignore[no-any-return]


def _divisors(n: int) -> list[int]:
    """Return the divisors of n in ascending order; sizes may be as large as an int32."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def _current_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the options ``rms_norm``, ``swiglu`` and a boolean ``qk_norm``, which older files hold."""
    current = dict(options)
    if "rms_norm" in current:
        current.setdefault("norm", "rms" if current.pop("rms_norm") else "layer")
    if "swiglu" in current:
        current.setdefault("mlp", "swiglu" if current.pop("swiglu") else "gelu_tanh")
    if isinstance(current.get("qk_norm"), bool):
        current["qk_norm"] = "rms" if current["qk_norm"] else "none"
    return current


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images ``[B, C, H, W]`` into tokens ``[B, T, patch · patch · C]``, channels innermost."""
    b, c, height, width = images.shape
    cut = images.reshape(b, c, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, patch * patch * c)


def unpatchify(tokens: Tensor, patch: int, channels: int) -> Tensor:
    """Invert :func:`patchify` for square images."""
    b, count, _ = tokens.shape
    side = math.isqrt(count)
    cut = tokens.reshape(b, side, side, patch, patch, channels)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(b, channels, side * patch, side * patch)


def sincos_positions(size: int, side: int) -> Tensor:
    """Return the 2-D sin-cos table ``[side², size]``: columns in its first half, rows in the second."""
    frequency = 10_000.0 ** (-torch.arange(size // 4, dtype=torch.float64, device="cpu") / (size // 4))
    index = torch.arange(side, dtype=torch.float64, device="cpu")
    row, column = (t.reshape(-1, 1) * frequency for t in torch.meshgrid(index, index, indexing="ij"))
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1).float()
