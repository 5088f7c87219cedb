"""ConvDecoder: a light convolutional generator for small images, called like the paper's :class:`DiT`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import InputError, OptionError, unknown_name
from driftgen.generators.base import check_noise
from driftgen.generators.conditioning import Conditioning, ImageGenerator, RMSNorm, float32_linear
from driftgen.generators.option_checks import check_sizes, check_types
from driftgen.ops.modulated_group_norm import modulated_group_norm
from driftgen.support.checked_arguments import checked

__all__ = ["ConvDecoder", "ConvDecoderConfig"]


@dataclass(frozen=True)
class ConvDecoderConfig:
    """Options of a :class:`ConvDecoder`, coarsest level first. The defaults are for 32×32×3 images.

    Attributes:
        input_size: side of the samples.
        in_channels: channels of the samples.
        widths: channels per level. Each level after the first doubles the resolution.
        groups: groups of each normalization; divides every width.
        condition_size: width of the condition vector.
        num_classes: number of classes.
        style_codebooks: number of style codebooks; 0 for no style input.
        style_entries: entries of each codebook.
    """

    input_size: int = 32
    in_channels: int = 3
    widths: tuple[int, ...] = (128, 64, 32, 16)
    groups: int = 8
    condition_size: int = 64
    num_classes: int = 10
    style_codebooks: int = 0
    style_entries: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        object.__setattr__(self, "widths", tuple(self.widths))  # JSON has lists
        check_sizes(self, {"style_codebooks": 0})
        if not self.widths:
            raise InputError("widths is empty: give at least one level, such as [64, 32, 16]")
        levels, problems = len(self.widths), []
        most = (self.input_size & -self.input_size).bit_length()
        if levels > most:
            unit = 2 ** (levels - 1)
            problems.append(
                f"widths has {levels} levels, but input_size={self.input_size} can be halved {most - 1} "
                f"times (pad the images to {math.ceil(self.input_size / unit) * unit}, or use fewer levels)"
            )
        uneven = [width for width in self.widths if width % self.groups]
        if uneven:
            problems.append(f"widths has {uneven[0]}, which groups={self.groups} does not divide")
        if problems:
            widths = self.widths[-min(levels, most) :]  # the finest levels keep their widths
            fitting = {"widths": widths, "groups": math.gcd(self.groups, *widths)}
            suggested = {name: value for name, value in fitting.items() if value != getattr(self, name)}
            raise OptionError("; ".join(problems), suggested)

    @property
    def coarse(self) -> int:
        """Side of the coarsest map."""
        return int(self.input_size // 2 ** (len(self.widths) - 1))


PRESETS: dict[str, dict[str, Any]] = {
    "32px": {},
    "64px": {"input_size": 64, "widths": (256, 128, 64, 32, 16)},
}


class ConvDecoder(ImageGenerator):
    """x = f(ε, c, α): map noise ``[B, C, H, W]`` to samples of the same shape in one call.

    A linear layer maps all noise to the coarsest map. Each further level doubles the resolution and applies
    one convolution to the result and to noise at that resolution, which becomes texture; the condition
    modulates its normalization. Fine levels are narrow and have a single convolution: on a CPU a step is
    several times as fast as that of a :class:`UNet2D`.

    Args:
        config: the options; the defaults of :class:`ConvDecoderConfig` if None.
        options: fields of :class:`ConvDecoderConfig` that replace those of ``config``.
    """

    config: ConvDecoderConfig

    @checked
    def __init__(self, config: ConvDecoderConfig | None = None, **options: Any) -> None:
        super().__init__()
        for option in options:
            if option not in ConvDecoderConfig.__dataclass_fields__:
                raise unknown_name("option", option, ConvDecoderConfig.__dataclass_fields__)
        c = self.config = replace(config or ConvDecoderConfig(), **options)
        self.conditioning = Conditioning(c.num_classes, c.style_codebooks, c.style_entries, c.condition_size)
        self.condition_norm = RMSNorm(c.condition_size)
        self.modulation = nn.Linear(c.condition_size, 2 * sum(c.widths))
        self.input = nn.Linear(c.in_channels * c.input_size**2, c.widths[0] * c.coarse**2)
        self.levels = nn.ModuleList(  # normalization would remove a bias
            nn.Conv2d(before + c.in_channels, width, 3, padding=1, bias=False)
            for before, width in zip(c.widths, c.widths[1:], strict=False)
        )
        self.output = nn.Conv2d(c.widths[-1], c.in_channels, 3, padding=1)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, **options: Any) -> ConvDecoder:
        """Build a model for color images of 32 or 64 pixels."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize layers to preserve the variance, with zero biases, embeddings with standard deviation
        0.02, and modulations with half the scale of what they modulate.

        The output layer is not small: identical samples do not repel each other, so a generator that starts
        as a constant stays one. Samples start with standard deviation near 0.6.
        """
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.modulation.weight, std=0.5 / math.sqrt(self.config.condition_size))
        # SiLU reduces the standard deviation to 0.6 of its input, and neighbors of an upsampled map agree.
        nn.init.normal_(self.output.weight, std=1.1 / math.sqrt(self.output.weight[0].numel()))

    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Return samples for Gaussian noise ``[B, C, H, W]`` and condition vectors."""
        c = self.config
        check_noise(gaussian, self.sample_shape)
        # Embeddings start small. Normalized, the classes differ from the first step on.
        modulation = float32_linear(self.modulation, self.condition_norm(condition))
        parts = iter(modulation.split([2 * width for width in c.widths], dim=1))
        noise = gaussian.to(self.output.weight.dtype)
        x = self.input(noise.flatten(1)).unflatten(1, (c.widths[0], c.coarse, c.coarse))
        x = modulated_group_norm(x, c.groups, *next(parts).chunk(2, dim=1))
        for convolution, part in zip(self.levels, parts, strict=True):
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            stride = c.input_size // x.shape[2]
            x = convolution(torch.cat([x, noise[:, :, ::stride, ::stride]], dim=1))
            x = modulated_group_norm(x, c.groups, *part.chunk(2, dim=1))
        return self.output(x)  # type: ignore[no-any-return]
