"""ImageMLP: a multilayer perceptron for tiny images, called like the paper's :class:`DiT`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.errors import unknown_name
from driftgen.generators.base import check_noise
from driftgen.generators.conditioning import Conditioning, ImageGenerator, RMSNorm, float32_linear
from driftgen.generators.option_checks import check_sizes, check_types
from driftgen.support.checked_arguments import checked

__all__ = ["ImageMLP", "ImageMLPConfig"]


@dataclass(frozen=True)
class ImageMLPConfig:
    """Options of an :class:`ImageMLP`. The defaults are for gray images of 8×8 pixels.

    Attributes:
        input_size: side of the samples.
        in_channels: channels of the samples.
        hidden_size: width of the hidden layers.
        depth: number of hidden layers.
        condition_size: width of the condition vector.
        num_classes: number of classes.
        style_codebooks: number of style codebooks; 0 for no style input.
        style_entries: entries of each codebook.
    """

    input_size: int = 8
    in_channels: int = 1
    hidden_size: int = 256
    depth: int = 3
    condition_size: int = 32
    num_classes: int = 10
    style_codebooks: int = 0
    style_entries: int = 64

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, {"style_codebooks": 0})

    @property
    def pixels(self) -> int:
        """Number of values of one sample."""
        return self.in_channels * self.input_size**2


PRESETS: dict[str, dict[str, Any]] = {
    "8px": {},
    "16px": {"input_size": 16, "hidden_size": 512, "condition_size": 64},
}


class ImageMLP(ImageGenerator):
    """x = f(ε, c, α): map noise ``[B, C, H, W]`` to samples of the same shape in one call.

    Each hidden layer is silu(W x · (1 + scale) + shift); the condition sets scale and shift.

    Args:
        config: the options; the defaults of :class:`ImageMLPConfig` if None.
        options: fields of :class:`ImageMLPConfig` that replace those of ``config``.
    """

    config: ImageMLPConfig

    @checked
    def __init__(self, config: ImageMLPConfig | None = None, **options: Any) -> None:
        super().__init__()
        for option in options:
            if option not in ImageMLPConfig.__dataclass_fields__:
                raise unknown_name("option", option, ImageMLPConfig.__dataclass_fields__)
        c = self.config = replace(config or ImageMLPConfig(), **options)
        self.conditioning = Conditioning(c.num_classes, c.style_codebooks, c.style_entries, c.condition_size)
        self.condition_norm = RMSNorm(c.condition_size)
        self.modulation = nn.Linear(c.condition_size, 2 * c.depth * c.hidden_size)
        self.layers = nn.ModuleList(
            nn.Linear(c.hidden_size if i else c.pixels, c.hidden_size) for i in range(c.depth)
        )
        self.output = nn.Linear(c.hidden_size, c.pixels)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, **options: Any) -> ImageMLP:
        """Build a model for gray images of 8 or 16 pixels."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize linear layers to preserve the variance through SiLU, with zero biases, embeddings with
        standard deviation 0.02, and modulations with half the scale of what they modulate.

        The output layer is not small: identical samples do not repel each other, so a generator that starts
        as a constant stays one. Samples start with standard deviation near 0.6.
        """
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=1.5 / math.sqrt(layer.in_features))  # type: ignore[arg-type]
        nn.init.normal_(self.modulation.weight, std=0.5 / math.sqrt(self.config.condition_size))
        nn.init.normal_(self.output.weight, std=0.6 / math.sqrt(self.config.hidden_size))

    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Return samples for Gaussian noise ``[B, C, H, W]`` and condition vectors."""
        c = self.config
        check_noise(gaussian, self.sample_shape)
        # Embeddings start small. Normalized, the classes differ from the first step on.
        modulation = float32_linear(self.modulation, self.condition_norm(condition))
        x = gaussian.flatten(1).to(self.output.weight.dtype)
        for layer, part in zip(self.layers, modulation.to(x.dtype).chunk(c.depth, dim=1), strict=True):
            scale, shift = part.chunk(2, dim=1)
            x = F.silu(layer(x) * (1 + scale) + shift)
        return self.output(x).reshape(gaussian.shape)  # type: ignore[no-any-return]
