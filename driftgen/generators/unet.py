"""UNet2D: a convolutional generator for small images, called like the paper's :class:`DiT`."""

from __future__ import annotations

import math
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
from driftgen.ops.aligned_conv import aligned_conv
from driftgen.ops.compile import compile_blocks
from driftgen.ops.modulated_group_norm import modulated_group_norm
from driftgen.ops.norms import EPSILON
from driftgen.support.checked_arguments import checked

__all__ = ["UNet2D", "UNet2DConfig"]


@dataclass(frozen=True)
class UNet2DConfig:
    """Options of a :class:`UNet2D`, finest level first. The defaults are for 32×32×3 images.

    Attributes:
        input_size: side of the samples.
        in_channels: channels of the samples.
        patch_size: side of the patches that are channels of the finest level, as in a DiT.
        widths: channels per level. Each level after the first halves the resolution.
        blocks: residual blocks per level, in the encoder and in the decoder; as many numbers as widths.
        attention_levels: levels with self-attention; 0 is the finest.
        head_size: channels of an attention head; divides the widths of the levels with attention.
        groups: groups of each normalization; divides every width.
        condition_size: width of the condition vector.
        num_classes: number of classes.
        style_codebooks: number of style codebooks; 0 for no style input.
        style_entries: entries of each codebook.
    """

    input_size: int = 32
    in_channels: int = 3
    patch_size: int = 1
    widths: tuple[int, ...] = (48, 96, 192, 448)
    blocks: tuple[int, ...] = (1, 1, 1, 2)
    attention_levels: tuple[int, ...] = (2,)
    head_size: int = 64
    groups: int = 16
    condition_size: int = 256
    num_classes: int = 10
    style_codebooks: int = 32
    style_entries: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("widths", "blocks", "attention_levels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))  # JSON has lists
        check_sizes(self, {"style_codebooks": 0, "attention_levels": 0})
        if not self.widths:
            raise InputError("widths is empty: give at least one level, such as [64, 128, 256]")
        problems = self._problems()
        if problems:
            raise OptionError("; ".join(problems), self._fitting())

    def _problems(self) -> list[str]:
        """Return one line for each pair of options that do not fit together."""
        levels, problems, patch = len(self.widths), [], self.patch_size
        if self.input_size % patch:
            problems.append(f"input_size={self.input_size} is no multiple of patch_size={patch}")
        elif self.input_size % (patch * 2 ** (levels - 1)):
            side = self.input_size // patch
            patches = f" in patches of {patch}" if patch > 1 else ""
            problems.append(
                f"widths has {levels} levels, but input_size={self.input_size}{patches} can be halved "
                f"{_halvings(side)} times (pad the images to {_padded(side, levels) * patch}, or use fewer "
                "levels)"
            )
        if len(self.blocks) != levels:
            problems.append(f"widths has {levels} levels, blocks has {len(self.blocks)}")
        inside = [level for level in self.attention_levels if level < levels]
        if len(inside) < len(self.attention_levels):
            problems.append(
                f"widths has levels 0 to {levels - 1}, attention_levels has {max(self.attention_levels)}"
            )
        for width in self.widths:
            if width % self.groups:
                problems.append(f"widths has {width}, which groups={self.groups} does not divide")
                break
        for level in inside:
            if self.widths[level] % self.head_size:
                problems.append(
                    f"widths has {self.widths[level]} at attention level {level}, which "
                    f"head_size={self.head_size} does not divide"
                )
                break
        return problems

    def _fitting(self) -> dict[str, Any]:
        """Return the options to change, with the values closest to the given ones that fit together."""
        patch = math.gcd(self.patch_size, self.input_size)
        levels = min(len(self.widths), _halvings(self.input_size // patch) + 1)
        widths = self.widths[:levels]
        # The coarsest levels have most blocks: drop the finest ones, or repeat the first.
        blocks = self.blocks[-levels:] or (1,)
        blocks = (blocks[0],) * (levels - len(blocks)) + blocks
        attention = tuple(level for level in self.attention_levels if level < levels)
        if self.attention_levels and not attention:
            attention = (levels - 1,)
        fitting = {
            "patch_size": patch,
            "widths": widths,
            "blocks": blocks,
            "attention_levels": attention,
            "groups": math.gcd(self.groups, *widths),
            "head_size": math.gcd(self.head_size, *(widths[level] for level in attention)),
        }
        return {name: value for name, value in fitting.items() if value != getattr(self, name)}


def _padded(size: int, levels: int) -> int:
    """Return the next size that has this many levels."""
    unit = 1 << (levels - 1)
    return math.ceil(size / unit) * unit


def _halvings(size: int) -> int:
    """Number of times that a size can be halved."""
    return (size & -size).bit_length() - 1


# Levels with many pixels are narrow: they take most of the time and hold few of the parameters.
PRESETS: dict[str, dict[str, Any]] = {
    "28px": {
        "input_size": 28,
        "in_channels": 1,
        "widths": (64, 128, 256),
        "blocks": (1, 1, 2),
        "attention_levels": (1, 2),
    },
    "32px": {},
    "64px": {
        "input_size": 64,
        "widths": (64, 128, 192, 256, 384),
        "blocks": (1, 1, 1, 2, 2),
        "attention_levels": (2, 3),
    },
}


class UNet2D(ImageGenerator):
    """x = f(ε, c, α): map noise ``[B, C, H, W]`` to samples of the same shape in one call.

    Args:
        config: the options; the defaults of :class:`UNet2DConfig` if None.
        checkpoint_blocks: recompute each block in the backward pass instead of storing its activations.
        options: fields of :class:`UNet2DConfig` that replace those of ``config``.
    """

    config: UNet2DConfig

    @checked
    def __init__(
        self, config: UNet2DConfig | None = None, *, checkpoint_blocks: bool = False, **options: Any
    ) -> None:
        super().__init__()
        for option in options:
            if option not in UNet2DConfig.__dataclass_fields__:
                raise unknown_name("option", option, UNet2DConfig.__dataclass_fields__)
        c = self.config = replace(config or UNet2DConfig(), **options)
        self.checkpoint_blocks = checkpoint_blocks
        h = c.condition_size
        self.conditioning = Conditioning(c.num_classes, c.style_codebooks, c.style_entries, h)
        channels = c.in_channels * c.patch_size**2
        self.input = nn.Conv2d(channels, c.widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        x = c.widths[0]
        for level, width in enumerate(c.widths):
            if level:
                self.down.append(nn.Conv2d(x, width, 3, stride=2, padding=1))
            self.down.extend(Block(c, level, width) for _ in range(c.blocks[level]))
            x = width
        self.middle = Block(c, len(c.widths) - 1, x)
        for level, width in reversed(list(enumerate(c.widths))):
            for _ in range(c.blocks[level]):
                self.up.append(Block(c, level, x + width))  # with a skip
                x = width
            if level:
                self.up.append(nn.Identity())  # the next block upsamples; weights keep their names
        self.final_norm = AdaptiveNorm(c, x)
        self.output = nn.Conv2d(x, channels, 3, padding=1)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, *, checkpoint_blocks: bool = False, **options: Any) -> UNet2D:
        """Build a model for images of 28 pixels (gray), 32 or 64 pixels (color)."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(checkpoint_blocks=checkpoint_blocks, **{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize convolutions to preserve the variance, embeddings with standard deviation 0.02, and
        modulations and the last layer of each residual branch with zeros.

        The output layer is not zero: identical samples do not repel each other, so a generator that starts as
        a constant stays one. Samples start as filtered noise of standard deviation near 0.8.
        """
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        # SiLU reduces the standard deviation to 0.6 of its input.
        nn.init.normal_(self.output.weight, std=1.4 / math.sqrt(self.output.weight[0].numel()))
        for module in self.modules():
            if isinstance(module, Block):
                nn.init.zeros_(module.second.weight)
            elif isinstance(module, Attention):
                nn.init.zeros_(module.output.weight)
            elif isinstance(module, AdaptiveNorm):
                nn.init.zeros_(module.modulation.weight)

    def compile_parts(self) -> None:
        """Compile the blocks, each shape once."""
        compile_blocks(self, Block, AdaptiveNorm)

    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Return samples for Gaussian noise ``[B, C, H, W]`` and condition vectors."""
        check_noise(gaussian, self.sample_shape)
        activated = F.silu(condition)
        patch = self.config.patch_size
        x = gaussian.to(self.input.weight.dtype)
        x = aligned_conv(self.input, F.pixel_unshuffle(x, patch) if patch > 1 else x)
        skips: list[Tensor] = []
        for layer in self.down:
            if isinstance(layer, Block):
                x = self._run(layer, x, activated)
                skips.append(x)
            else:
                x = layer(x)
        x = self._run(self.middle, x, activated)
        for layer in self.up:
            if isinstance(layer, Block):
                x = self._run(layer, x, activated, skips.pop())
        out = aligned_conv(self.output, self.final_norm(x, activated))
        return F.pixel_shuffle(out, patch) if patch > 1 else out

    def _run(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        if self.checkpoint_blocks and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        out: Tensor = block(*inputs)
        return out


class Block(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))) with modulated norms, then attention if the level has it.

    With a skip, the channels of x, upsampled if it is smaller, and of the skip are the input. This belongs to
    the block, so that a compiled block reads and writes these maps once.
    """

    def __init__(self, c: UNet2DConfig, level: int, channels: int) -> None:
        super().__init__()
        width = c.widths[level]
        self.first_norm, self.second_norm = AdaptiveNorm(c, channels), AdaptiveNorm(c, width)
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut: nn.Module = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)
        self.attention: nn.Module = Attention(c, width) if level in c.attention_levels else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor, skip: Tensor | None = None) -> Tensor:
        if skip is not None:
            x = torch.cat([upsample(x) if x.shape[-1] < skip.shape[-1] else x, skip], dim=1)
        h = self.first(self.first_norm(x, condition))
        h = self.second(self.second_norm(h, condition))
        out: Tensor = self.attention(self.shortcut(x) + h)
        return out


def upsample(x: Tensor) -> Tensor:
    """Nearest-neighbor upsampling by 2 in the dtype of the map; the convolution after it smooths the result.

    Under autocast on a GPU, ``F.interpolate`` returns float32, and so would all layers up to the first
    convolution of the block: the concatenation with a skip, the norm and the shortcut.
    """
    if x.is_cuda:
        return repeat_pixels(x)
    with torch.autocast(x.device.type, enabled=False):
        return F.interpolate(x, scale_factor=2.0, mode="nearest")


def repeat_pixels(x: Tensor) -> Tensor:
    """Nearest-neighbor upsampling by 2 in the memory format of the map, by views.

    Its gradient is a sum. The compiled gradient of ``F.interpolate`` adds atomically: on an H200 it takes as
    long as four convolutions of the level.
    """
    b, c, h, w = x.shape
    if x.is_contiguous(memory_format=torch.channels_last):
        rows = x.permute(0, 2, 3, 1)[:, :, None, :, None].expand(b, h, 2, w, 2, c)
        return rows.reshape(b, 2 * h, 2 * w, c).permute(0, 3, 1, 2)
    return x[:, :, :, None, :, None].expand(b, c, h, 2, w, 2).reshape(b, c, 2 * h, 2 * w)


class AdaptiveNorm(nn.Module):
    """silu(norm(x) · (1 + scale) + shift): GroupNorm in float32; the condition sets scale and shift."""

    def __init__(self, c: UNet2DConfig, channels: int) -> None:
        super().__init__()
        self.groups = c.groups
        self.modulation = nn.Linear(c.condition_size, 2 * channels)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = float32_linear(self.modulation, condition).chunk(2, dim=1)
        return modulated_group_norm(x, self.groups, scale, shift)


class Attention(nn.Module):
    """x + self-attention over all pixels, with normalized queries and keys."""

    def __init__(self, c: UNet2DConfig, width: int) -> None:
        super().__init__()
        self.groups, self.head_size = c.groups, c.head_size
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.query_norm, self.key_norm = RMSNorm(c.head_size), RMSNorm(c.head_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = F.group_norm(x.float(), self.groups, eps=EPSILON).to(x.dtype)
        tokens = normed.flatten(2).transpose(1, 2)
        qkv = self.qkv(tokens).unflatten(-1, (3, -1, self.head_size)).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # each [B, heads, pixels, head]
        mixed = F.scaled_dot_product_attention(self.query_norm(q), self.key_norm(k), v)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return x + out.transpose(1, 2).reshape(x.shape)
