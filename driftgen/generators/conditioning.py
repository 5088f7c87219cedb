"""What a generator is told beside the Gaussian noise: class, guidance strength, style; the parts in float32
that it enters through; and what all generators of images do alike with it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.generators.base import Noise, draw_noise

__all__ = ["AlphaEmbedding", "Conditioning", "ImageGenerator", "RMSNorm", "float32_linear"]


class Conditioning(nn.Module):
    """(c, α, style) -> ``[B, h]``: class + alpha + sum of style embeddings (appendix "Random style
    embeddings").

    Embeddings start with standard deviation 0.02.
    """

    def __init__(self, classes: int, codebooks: int, entries: int, size: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(classes, size)
        self.styles = nn.ModuleList(nn.Embedding(entries, size) for _ in range(codebooks))
        self.alpha = AlphaEmbedding(size)

    def forward(self, labels: Tensor, alpha: Tensor | float, style: Tensor) -> Tensor:
        alpha = torch.as_tensor(alpha, dtype=torch.float32, device=labels.device).expand(labels.shape)
        total: Tensor = self.classes(labels) + self.alpha(alpha)
        for i, embedding in enumerate(self.styles):
            total = total + embedding(style[:, i])
        return total


class ImageSizes(Protocol):
    """What every configuration of a generator of images says."""

    @property
    def in_channels(self) -> int: ...

    @property
    def input_size(self) -> int: ...

    @property
    def style_codebooks(self) -> int: ...

    @property
    def style_entries(self) -> int: ...


class ImageGenerator(nn.Module, ABC):
    """x = f(ε, c, α), up to how samples come from noise and condition: that is :meth:`generate`.

    What inherits it sets ``config`` and ``conditioning``.
    """

    config: ImageSizes
    conditioning: Conditioning

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """``C, H, W`` of the noise, and of the samples."""
        return self.config.in_channels, self.config.input_size, self.config.input_size

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """Gaussian noise and style indices for n samples, on the device of the weights; see
        ``draw_noise``.
        """
        c, device = self.config, self.conditioning.classes.weight.device
        return draw_noise(n, self.sample_shape, c.style_codebooks, c.style_entries, generator, device)

    def condition(self, labels: Tensor, alpha: Tensor | float, style: Tensor) -> Tensor:
        """The vector ``[B, h]`` that conditions every block."""
        vector: Tensor = self.conditioning(labels, alpha, style)
        return vector

    def forward(self, noise: Noise, labels: Tensor, alpha: Tensor | float = 1.0) -> Tensor:
        """f(ε, c, α): ``[B, C, H, W]``."""
        return self.generate(noise.gaussian, self.condition(labels, alpha, noise.style))

    @abstractmethod
    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Samples from Gaussian noise and a condition vector."""


class AlphaEmbedding(nn.Module):
    """The guidance strength α as a vector: 256 cosines and sines, a two-layer network, RMSNorm, times
    0.02.
    """

    def __init__(self, hidden_size: int, frequencies: int = 128) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.first, self.second = nn.Linear(2 * frequencies, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.norm = RMSNorm(hidden_size)

    def forward(self, alpha: Tensor) -> Tensor:
        steps = torch.arange(self.frequencies, dtype=torch.float32, device=alpha.device)
        angles = alpha[:, None] * torch.exp(steps * (-math.log(10_000.0) / self.frequencies))
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.first.weight.dtype)
        embedded: Tensor = self.norm(self.second(F.silu(self.first(waves))))
        return 0.02 * embedded  # as small as the class embedding it is added to


class RMSNorm(nn.Module):
    """x / √(mean(x²) + 1e-6) · weight, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), 1e-6).to(x.dtype)


def float32_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer in float32, also under autocast: gates that start at zero move by less than bf16 can tell."""
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), layer.weight.float(), layer.bias.float())
