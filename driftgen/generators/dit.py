"""DiT: the paper's generator, a Transformer from noise, label and guidance strength to a sample (appendix
"Generator Architecture")."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from driftgen.errors import InputError, unknown_name
from driftgen.generators.base import check_noise
from driftgen.generators.conditioning import Conditioning, ImageGenerator, RMSNorm, float32_linear
from driftgen.ops.adaln import (
    gated_norm,
    gated_residual,
    modulated_norm,
    stream_norm,
    supports_adaln,
)
from driftgen.ops.attention import attention, supports_attention
from driftgen.ops.compile import compile_blocks
from driftgen.ops.dispatch import is_plain, linear_and_bias
from driftgen.ops.fp8_activations import Fp8Activation, fp8_norm, supports_fp8_norm
from driftgen.ops.qk_norm_rope import qk_norm_rope, supports_qk_norm_rope
from driftgen.ops.swiglu import swiglu_output

__all__ = ["DiT", "DiTConfig"]


@dataclass(frozen=True)
class DiTConfig:
    """The shape of a :class:`DiT`. The defaults are the paper's B/2 for 32×32×4 latents."""

    input_size: int = 32
    in_channels: int = 4
    patch_size: int = 2
    hidden_size: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    context_tokens: int = 16  # in-context conditioning tokens, ahead of the image tokens
    style_codebooks: int = 32
    style_entries: int = 64
    qk_norm: bool = True
    swiglu: bool = True
    rope: bool = True
    rms_norm: bool = True
    attention_float32: bool = False  # attention in float32 whatever the rest runs in

    def __post_init__(self) -> None:
        sizes = {k: v for k, v in asdict(self).items() if isinstance(v, int) and not isinstance(v, bool)}
        for name, value in sizes.items():
            if value < (0 if name in ("context_tokens", "style_codebooks") else 1):
                raise InputError(f"{name}={value} is too small")
        if self.input_size % self.patch_size:
            raise InputError(f"patch_size={self.patch_size} does not divide input_size={self.input_size}")
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise InputError(
                f"num_heads={self.num_heads} must divide hidden_size={self.hidden_size} into even heads"
            )
        if self.hidden_size % 4:
            raise InputError(f"hidden_size={self.hidden_size} must be a multiple of 4")

    @property
    def tokens(self) -> int:
        """Number of image tokens."""
        return (self.input_size // self.patch_size) ** 2

    @property
    def mlp_size(self) -> int:
        """Width of the feed-forward layer: SwiGLU takes two thirds of it, rounded up to a multiple of 32."""
        width = int(self.hidden_size * self.mlp_ratio)
        return math.ceil(int(width * 2 / 3) / 32) * 32 if self.swiglu else width


_LARGE = {"hidden_size": 1024, "depth": 24, "num_heads": 16}
_PIXEL = {"input_size": 256, "in_channels": 3, "patch_size": 16, "attention_float32": True}
_SMALL = {"in_channels": 3, "hidden_size": 384, "depth": 12, "num_heads": 6, "num_classes": 10}
PRESETS: dict[str, dict[str, Any]] = {
    "B/2": {},
    "L/2": {**_LARGE},
    "B/16": {**_PIXEL},
    "L/16": {**_PIXEL, **_LARGE},
    # For images of 32 and 64 pixels: 256 tokens like the paper's.
    "S/2-32px": {**_SMALL, "input_size": 32, "patch_size": 2},
    "S/4-64px": {**_SMALL, "input_size": 64, "patch_size": 4},
}


class DiT(ImageGenerator):
    """x = f(ε, c, α), noise ``[B, C, H, W]`` to samples of the same shape, in one call.

    ``options`` are fields of :class:`DiTConfig`, on top of ``config`` where one is given.
    ``checkpoint_blocks`` trades a second forward pass of each block for its activations.
    """

    config: DiTConfig

    def __init__(
        self, config: DiTConfig | None = None, *, checkpoint_blocks: bool = False, **options: Any
    ) -> None:
        super().__init__()
        for option in options:
            if option not in DiTConfig.__dataclass_fields__:
                raise unknown_name("option", option, DiTConfig.__dataclass_fields__)
        c = self.config = replace(config or DiTConfig(), **options)
        self.checkpoint_blocks = checkpoint_blocks
        h, patch = c.hidden_size, c.patch_size**2 * c.in_channels
        self.conditioning = Conditioning(c.num_classes, c.style_codebooks, c.style_entries, h)
        self.patch_embedding = nn.Linear(patch, h)
        self.context_projection = nn.Linear(h, h)
        self.context = nn.Parameter(torch.empty(1, c.context_tokens, h))
        self.positions = nn.Parameter(torch.empty(1, c.tokens, h))
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.depth))
        self.final = Final(c, patch)
        self.reset_parameters()

    @classmethod
    def preset(cls, name: str, *, checkpoint_blocks: bool = False, **options: Any) -> DiT:
        """The paper's B/2, L/2 (latents), B/16, L/16 (pixels), or a small one for 32- or 64-pixel images."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(checkpoint_blocks=checkpoint_blocks, **{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Xavier-uniform linears with zero biases, embeddings of standard deviation 0.02, adaLN and output
        zero.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.context, std=0.02)
        side = self.config.input_size // self.config.patch_size
        with torch.no_grad():
            self.positions.copy_(sincos_positions(self.config.hidden_size, side))
        for block in self.blocks:
            nn.init.zeros_(block.modulation.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(self.final.modulation.weight)
        nn.init.zeros_(self.final.output.weight)

    def compile_parts(self) -> None:
        """Compiles the block that it repeats, the last layer, and the sum of embeddings that conditions
        them.
        """
        compile_blocks(self, Block, Final, Conditioning)

    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Samples from Gaussian noise and a condition vector."""
        c = self.config
        check_noise(gaussian, self.sample_shape)
        x = self.patch_embedding(patchify(gaussian.to(self.positions.dtype), c.patch_size))
        x = x + self.positions.to(x.dtype)
        context = self.context_projection(condition)[:, None] + self.context
        x = torch.cat([context.to(x.dtype), x], dim=1)
        activated = F.silu(condition)
        # Not among the weights: there ``.bfloat16()`` would round them.
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
        self.mlp: nn.Module = SwiGLU(h, c.mlp_size) if c.swiglu else MLPLayer(h, c.mlp_size)
        self.modulation = nn.Linear(h, 6 * h)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = self.attention_norm, self.mlp_norm
        if isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and supports_adaln(x):
            parts = float32_linear(self.modulation, condition)[:, None]
            shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts.chunk(6, dim=-1)
            x, normed = stream_norm(x, first.weight, scale, shift)
            bias: Tensor | None
            if is_plain(self.attention):
                branch, bias = self.attention.branch_and_bias(normed, cos, sin)
            else:
                branch, bias = self.attention(normed, cos, sin), None
            x, normed = gated_norm(x, branch, gate, second.weight, mlp_scale, mlp_shift, bias)
            if isinstance(self.mlp, (SwiGLU, MLPLayer)) and is_plain(self.mlp):
                branch, bias = self.mlp.branch_and_bias(normed)
            else:
                branch, bias = self.mlp(normed), None
            return gated_residual(x, branch, mlp_gate, bias)
        parts = _modulation(self.modulation, condition, x.dtype)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts.chunk(6, dim=-1)
        if isinstance(first, RMSNorm) and isinstance(second, RMSNorm) and self._reads_eight_bits(x):
            x, eights = fp8_norm(x, None, None, first.weight, scale, shift)
            branch = self.attention(eights, cos, sin)
            x, eights = fp8_norm(x, branch, gate, second.weight, mlp_scale, mlp_shift)
            total: Tensor = x + mlp_gate * self.mlp(eights)
            return total
        x = x + gate * self.attention(self.attention_norm(x) * (1 + scale) + shift, cos, sin)
        out: Tensor = x + mlp_gate * self.mlp(self.mlp_norm(x) * (1 + mlp_scale) + mlp_shift)
        return out

    def _reads_eight_bits(self, x: Tensor) -> bool:
        """Whether its layers take what a norm has rounded for them (``driftgen.generators.fp8``)."""
        layers = self.attention.qkv, self.mlp
        takes = all(getattr(layer, "takes_eight_bits", False) for layer in layers)
        return takes and is_plain(self.attention, *layers) and supports_fp8_norm(x)


class Attention(nn.Module):
    """Self-attention over all tokens with normalised queries and keys and rotary positions."""

    def __init__(self, c: DiTConfig) -> None:
        super().__init__()
        head = c.hidden_size // c.num_heads
        self.num_heads, self.rope, self.float32 = c.num_heads, c.rope, c.attention_float32
        self.qkv, self.output = (
            nn.Linear(c.hidden_size, 3 * c.hidden_size),
            nn.Linear(c.hidden_size, c.hidden_size),
        )
        self.query_norm: nn.Module = RMSNorm(head) if c.qk_norm else nn.Identity()
        self.key_norm: nn.Module = RMSNorm(head) if c.qk_norm else nn.Identity()

    def forward(self, x: Tensor | Fp8Activation, cos: Tensor, sin: Tensor) -> Tensor:
        out: Tensor = self.output(self.mixed(x, cos, sin))
        return out

    def branch_and_bias(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same, and the last bias where it is owed its gradient (see ``linear_and_bias``)."""
        return linear_and_bias(self.output, self.mixed(x, cos, sin))

    def mixed(self, x: Tensor | Fp8Activation, cos: Tensor, sin: Tensor) -> Tensor:
        """What the output layer reads: softmax(q kᵀ / √head) v, ``[B, tokens, heads · head]``."""
        weights, heads = self._norm_weights(), self.num_heads
        if weights and isinstance(x, Tensor) and supports_qk_norm_rope(x, heads, parts=1):
            qkv, bias = linear_and_bias(self.qkv, x)
        else:
            qkv, bias = self.qkv(x), None
        if weights and supports_attention(qkv, heads):
            return attention(qkv, *weights, cos, sin, heads, bias, self.float32)
        q, k, v = self.heads(qkv, cos, sin, bias)
        if self.float32:
            with torch.autocast(v.device.type, enabled=False):
                mixed = F.scaled_dot_product_attention(q.float(), k.float(), v.float()).to(v.dtype)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return mixed.transpose(1, 2).flatten(2)

    def heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, heads, tokens, head]``; ``bias`` is what ``qkv`` owes a gradient."""
        weights, heads = self._norm_weights(), self.num_heads
        if weights and (bias is not None or supports_qk_norm_rope(qkv, heads)):
            return qk_norm_rope(qkv, *weights, cos, sin, heads, bias)
        q, k, v = qkv.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
        q, k = self.query_norm(q), self.key_norm(k)
        if self.rope:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def _norm_weights(self) -> tuple[Tensor, Tensor] | None:
        """Of queries and keys, where kernels know what is done to them: RMSNorm and rotation."""
        query, key = self.query_norm, self.key_norm
        if self.rope and isinstance(query, RMSNorm) and isinstance(key, RMSNorm):
            return query.weight, key.weight
        return None


class SwiGLU(nn.Module):
    """W₃(silu(W₁x) · W₂x)."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(hidden_size, mlp_size), nn.Linear(hidden_size, mlp_size)
        self.output = nn.Linear(mlp_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(F.silu(self.gate(x)) * self.value(x))
        return out

    def branch_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same on a device with kernels, and the last bias where it is owed its gradient (see
        ``linear_and_bias``). Gate and value are one product, and x then has one gradient.
        """
        layers = self.gate, self.value, self.output
        if any(type(layer) is not nn.Linear for layer in layers) or not is_plain(*layers):
            return self(x), None
        bias = torch.cat([self.gate.bias, self.value.bias])
        both = F.linear(x, torch.cat([self.gate.weight, self.value.weight]), bias.detach())
        last = self.output
        return swiglu_output(both, bias, last.weight, last.bias), last.bias


class MLPLayer(nn.Sequential):
    """Two linear layers with a GELU between, as in DiT."""

    def __init__(self, hidden_size: int, mlp_size: int) -> None:
        gelu = nn.GELU(approximate="tanh")
        super().__init__(nn.Linear(hidden_size, mlp_size), gelu, nn.Linear(mlp_size, hidden_size))

    def branch_and_bias(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same, and the last bias where it is owed its gradient (see ``linear_and_bias``)."""
        return linear_and_bias(self[2], self[1](self[0](x)))


class Final(nn.Module):
    """Modulated norm and the projection to the pixels of a patch; both start at zero."""

    def __init__(self, c: DiTConfig, patch: int) -> None:
        super().__init__()
        self.norm = _norm(c)
        self.modulation = nn.Linear(c.hidden_size, 2 * c.hidden_size)
        self.output = nn.Linear(c.hidden_size, patch)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        if isinstance(self.norm, RMSNorm) and supports_adaln(x):
            shift, scale = float32_linear(self.modulation, condition)[:, None].chunk(2, dim=-1)
            normed = modulated_norm(x, self.norm.weight, scale, shift)
        else:
            shift, scale = _modulation(self.modulation, condition, x.dtype).chunk(2, dim=-1)
            normed = self.norm(x) * (1 + scale) + shift
        out: Tensor = self.output(normed)
        return out


class LayerNorm(nn.Module):
    """LayerNorm without parameters (the modulation has them), computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), (self.size,), eps=1e-6).to(x.dtype)


def _norm(c: DiTConfig) -> nn.Module:
    make: Callable[[int], nn.Module] = RMSNorm if c.rms_norm else LayerNorm
    return make(c.hidden_size)


def _modulation(layer: nn.Linear, condition: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`float32_linear`, ``[B, 1, ...]``, rounded to the type of the stream."""
    if not torch.is_grad_enabled() and condition.dtype == layer.weight.dtype == dtype:
        # Products of 16-bit numbers are summed in float32 and rounded once: the same, many times faster.
        with torch.autocast(condition.device.type, enabled=False):
            return layer(condition)[:, None]  # type: ignore[no-any-return]
    return float32_linear(layer, condition).to(dtype)[:, None]


def patchify(images: Tensor, patch: int) -> Tensor:
    """``[B, C, H, W]`` to ``[B, tokens, patch · patch · C]``, channels innermost."""
    b, c, height, width = images.shape
    cut = images.reshape(b, c, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(b, -1, patch * patch * c)


def unpatchify(tokens: Tensor, patch: int, channels: int) -> Tensor:
    """The inverse of :func:`patchify` for square images."""
    b, count, _ = tokens.shape
    side = math.isqrt(count)
    cut = tokens.reshape(b, side, side, patch, patch, channels)
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(b, channels, side * patch, side * patch)


def rope_tables(tokens: int, head: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[tokens, head / 2]`` of the 1-D rotary embedding over the flat index of all
    tokens.
    """
    frequency = 10_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64, device=device) / head)
    angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequency
    return angles.cos().float(), angles.sin().float()


_TABLES: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}


def cached_rope_tables(tokens: int, head: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """:func:`rope_tables`, computed once. They are never dropped: CUDA graphs may read them."""
    if _is_traced():
        return rope_tables(tokens, head, device)
    found = _TABLES.get((tokens, head, device))
    if found is not None:
        return found
    with torch.inference_mode(False):  # or training could not use what sampling computed
        cos, sin = rope_tables(tokens, head, device)
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if device.type in ("cpu", "cuda") and not capturing:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams are going to read them
        _TABLES[tokens, head, device] = cos, sin
    return cos, sin


def _is_traced() -> bool:
    """Whether tensors may be no more than their shapes, which must neither be kept nor meet kept ones."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (first half, second half) of each head by their position's angle, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def sincos_positions(size: int, side: int) -> Tensor:
    """The 2-D sin-cos table ``[side², size]``; its first half holds the column, the second the row."""
    frequency = 10_000.0 ** (-torch.arange(size // 4, dtype=torch.float64, device="cpu") / (size // 4))
    index = torch.arange(side, dtype=torch.float64, device="cpu")
    row, column = (t.reshape(-1, 1) * frequency for t in torch.meshgrid(index, index, indexing="ij"))
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1).float()
