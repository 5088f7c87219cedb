"""UNet1D: a convolutional generator of action chunks, as in Diffusion Policy."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError, OptionError, unknown_name
from driftgen.generators.chunks import TimeEmbedding, check_chunks, draw_chunk_noise
from driftgen.generators.option_checks import check_sizes, check_types
from driftgen.ops.compile import compile_blocks
from driftgen.ops.conv1d import Conv1d
from driftgen.support.checked_arguments import checked

__all__ = ["UNet1D", "UNet1DConfig"]


@dataclass(frozen=True)
class UNet1DConfig:
    """Options of a :class:`UNet1D`, finest level first.

    Attributes:
        action_size: width A of an action.
        horizon: actions T of a chunk.
        condition_size: width C of one observation token.
        observed: observation tokens K; the network reads them side by side.
        widths: channels per level. Each level after the first halves the horizon.
        kernel_size: width of the convolutions, an odd number.
        groups: groups of each normalization; divides every width.
        time_size: width of the embedding of a diffusion time step; 0 for a one-step generator.
    """

    action_size: int = 2
    horizon: int = 16
    condition_size: int = 20
    observed: int = 2
    widths: tuple[int, ...] = (128, 256, 512)
    kernel_size: int = 5
    groups: int = 8
    time_size: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "widths", tuple(self.widths))  # JSON has lists
        check_sizes(self, {"time_size": 0})
        if not self.widths:
            raise InputError("widths is empty: give at least one level, such as [128, 256, 512]")
        if self.kernel_size % 2 == 0:
            raise OptionError(
                f"kernel_size={self.kernel_size} is even", {"kernel_size": self.kernel_size + 1}
            )
        if self.horizon % 2 ** (len(self.widths) - 1):
            levels = (self.horizon & -self.horizon).bit_length()
            raise OptionError(
                f"widths has {len(self.widths)} levels, but horizon={self.horizon} can be halved "
                f"{levels - 1} times",
                {"widths": self.widths[:levels]},
            )
        groups = math.gcd(self.groups, *self.widths)
        if groups != self.groups:
            raise OptionError(f"groups={self.groups} does not divide every width", {"groups": groups})
        if self.time_size % 2:
            raise OptionError(f"time_size={self.time_size} is odd", {"time_size": self.time_size + 1})


PRESETS: dict[str, dict[str, Any]] = {
    "small": {"widths": (64, 128, 256)},
    "base": {},
    "diffusion-policy": {"widths": (256, 512, 1024)},
}


class UNet1D(nn.Module):
    """a = f(ε, o): map a noise chunk ``[B, T, A]`` to a chunk of actions of the same shape in one call.

    The observation tokens modulate every residual block (FiLM). With ``time_size`` the network also takes a
    diffusion time step, so that a diffusion baseline trains the same network.

    Args:
        config: the options; the defaults of :class:`UNet1DConfig` if None.
        options: fields of :class:`UNet1DConfig` that replace those of ``config``.
    """

    config: UNet1DConfig

    @checked
    def __init__(self, config: UNet1DConfig | None = None, **options: Any) -> None:
        super().__init__()
        for option in options:
            if option not in UNet1DConfig.__dataclass_fields__:
                raise unknown_name("option", option, UNet1DConfig.__dataclass_fields__)
        c = self.config = replace(config or UNet1DConfig(), **options)
        self.time = TimeEmbedding(c.time_size) if c.time_size else None
        condition, pad = c.observed * c.condition_size + c.time_size, c.kernel_size // 2
        self.input = Conv1d(c.action_size, c.widths[0], c.kernel_size, padding=pad)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        x = c.widths[0]
        for level, width in enumerate(c.widths):
            if level:
                self.down.append(Conv1d(x, x, 3, stride=2, padding=1))
            self.down.extend([Block(c, x, width, condition), Block(c, width, width, condition)])
            x = width
        self.middle = nn.ModuleList([Block(c, x, x, condition), Block(c, x, x, condition)])
        for level, width in reversed(list(enumerate(c.widths))):
            for _ in range(2):
                self.up.append(Block(c, x + width, width, condition))  # its input has a skip concatenated
                x = width
            if level:
                self.up.append(Upsample(x))
        self.final = nn.Sequential(
            Conv1d(x, x, c.kernel_size, padding=pad), nn.GroupNorm(c.groups, x), nn.Mish()
        )
        self.output = Conv1d(x, c.action_size, 1)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, **options: Any) -> UNet1D:
        """Build a network of one of three sizes: ``small``, ``base``, or that of Diffusion Policy."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize the output layer so that chunks start with standard deviation near 0.5.

        The output layer is not small: identical chunks do not repel each other, so a generator that starts
        as a constant stays one. Other layers have PyTorch's defaults, as in Diffusion Policy.
        """
        # Mish of a normalized map has a root mean square near 0.7.
        nn.init.normal_(self.output.weight, std=0.7 / math.sqrt(self.output.in_channels))
        nn.init.zeros_(self.output.bias)  # type: ignore[arg-type]

    def compile_parts(self) -> None:
        """Compile the blocks, each shape once."""
        compile_blocks(self, Block)

    def forward(self, noise: Tensor, condition: Tensor, time: Tensor | None = None) -> Tensor:
        """Return chunks ``[B, T, A]``.

        Args:
            noise: noise chunks, or noisy chunks of a diffusion model, ``[B, T, A]``.
            condition: observation tokens ``[B, K, C]``.
            time: diffusion time steps ``[B]``, for a network with ``time_size``.
        """
        c = self.config
        check_chunks(c, noise, condition, time, next(self.parameters()))
        context = condition.flatten(1).to(self.output.weight.dtype)
        if self.time is not None and time is not None:
            context = torch.cat([context, self.time(time)], dim=1)
        activated = F.mish(context)
        x = self.input(noise.to(self.output.weight.dtype).transpose(1, 2))
        skips: list[Tensor] = []
        for layer in self.down:
            if isinstance(layer, Block):
                x = layer(x, activated)
                skips.append(x)
            else:
                x = layer(x)
        for layer in self.middle:
            x = layer(x, activated)
        for layer in self.up:
            is_block = isinstance(layer, Block)
            x = layer(torch.cat([x, skips.pop()], dim=1), activated) if is_block else layer(x)
        x = self.final(x)
        with torch.autocast(x.device.type, enabled=False):  # actions need more than the 8 bits of bfloat16
            chunks: Tensor = self.output(x.to(self.output.weight.dtype))
        return chunks.transpose(1, 2)

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise chunks, see :func:`~driftgen.generators.chunks.draw_chunk_noise`."""
        return draw_chunk_noise(self.config, n, generator, self.output.weight.device)


class Upsample(nn.Module):
    """Repeats each step and smooths the result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.smooth = Conv1d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        repeated = x[..., None].expand(*x.shape, 2).flatten(2)
        out: Tensor = self.smooth(repeated)
        return out


class Block(nn.Module):
    """Two convolutions with GroupNorm and Mish and a shortcut; the condition modulates the first (FiLM)."""

    def __init__(self, c: UNet1DConfig, channels: int, width: int, condition: int) -> None:
        super().__init__()
        pad = c.kernel_size // 2
        self.first = Conv1d(channels, width, c.kernel_size, padding=pad)
        self.second = Conv1d(width, width, c.kernel_size, padding=pad)
        self.first_norm, self.second_norm = nn.GroupNorm(c.groups, width), nn.GroupNorm(c.groups, width)
        self.modulation = nn.Linear(condition, 2 * width)
        self.shortcut: nn.Module = nn.Identity() if channels == width else Conv1d(channels, width, 1)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.modulation(condition)[..., None].chunk(2, dim=1)
        h = F.mish(self.first_norm(self.first(x))) * (1 + scale) + shift
        out: Tensor = F.mish(self.second_norm(self.second(h))) + self.shortcut(x)
        return out
