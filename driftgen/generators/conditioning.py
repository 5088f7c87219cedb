"""Embeddings of class, guidance strength and style, layers that stay in float32, and the base class of the
image generators."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen.generators.base import Noise, check_inputs, draw_noise
from driftgen.ops.norms import rms_norm

__all__ = ["AlphaEmbedding", "Conditioning", "ImageGenerator", "RMSNorm", "float32_linear"]


class Conditioning(nn.Module):
    """Condition vector ``[B, h]`` = class + alpha + sum of style embeddings (appendix "Random style
    embeddings"). Embeddings start with standard deviation 0.02.
    """

    def __init__(self, classes: int, codebooks: int, entries: int, size: int) -> None:
        super().__init__()
        self.classes = nn.Embedding(classes, size)
        self.styles = nn.ModuleList(nn.Embedding(entries, size) for _ in range(codebooks))
        self.alpha = AlphaEmbedding(size)

    def forward(self, labels: Tensor, alpha: Tensor | float, style: Tensor) -> Tensor:
        alpha = torch.as_tensor(alpha, dtype=torch.float32, device=labels.device).expand(labels.shape)
        total: Tensor = self.classes(labels) + self.alpha(alpha)
        if not self.styles:
            return total
        # One lookup in one table: dozens of small ones would take a GPU longer than a block of the network.
        table = torch.cat([cast(Tensor, embedding.weight) for embedding in self.styles])
        first = torch.arange(len(self.styles), device=style.device) * (len(table) // len(self.styles))
        return total + F.embedding(style + first, table).sum(1)


class ImageSizes(Protocol):
    """Options that the configuration of every image generator has."""

    @property
    def in_channels(self) -> int: ...

    @property
    def input_size(self) -> int: ...

    @property
    def style_codebooks(self) -> int: ...

    @property
    def style_entries(self) -> int: ...


class ImageGenerator(nn.Module, ABC):
    """x = f(ε, c, α) without the network itself, which subclasses define in :meth:`generate`.

    Subclasses set ``config`` and ``conditioning``.
    """

    config: ImageSizes
    conditioning: Conditioning

    @property
    def sample_shape(self) -> tuple[int, int, int]:
        """``C, H, W`` of the noise and of the samples."""
        return self.config.in_channels, self.config.input_size, self.config.input_size

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Noise:
        """Draw Gaussian noise and style indices for n samples on the device of the weights; see
        :func:`driftgen.generators.base.draw_noise`.
        """
        c, device = self.config, self.conditioning.classes.weight.device
        return draw_noise(n, self.sample_shape, c.style_codebooks, c.style_entries, generator, device)

    def condition(self, labels: Tensor, alpha: Tensor | float, style: Tensor) -> Tensor:
        """Return the vector ``[B, h]`` that conditions every block."""
        vector: Tensor = self.conditioning(labels, alpha, style)
        return vector

    def forward(self, noise: Noise, labels: Tensor, alpha: Tensor | float = 1.0) -> Tensor:
        """Return samples f(ε, c, α), ``[B, C, H, W]``."""
        c, weight = self.config, self.conditioning.classes.weight
        check_inputs(noise, labels, alpha, weight, c.style_codebooks, c.style_entries)
        return self.generate(noise.gaussian, self.condition(labels.long(), alpha, noise.style))

    @abstractmethod
    def generate(self, gaussian: Tensor, condition: Tensor) -> Tensor:
        """Return samples for Gaussian noise ``[B, C, H, W]`` and condition vectors."""


class AlphaEmbedding(nn.Module):
    """Embedding of the guidance strength α: 256 cosines and sines, a two-layer network, RMSNorm, times
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
        return 0.02 * embedded  # the scale of the class embedding that it is added to


class RMSNorm(nn.Module):
    """x / √(mean(x²) + 1e-6) · weight, computed in float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight)


def float32_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply the layer in float32, also under autocast: updates of gates that start at zero are too small for
    bfloat16.
    """
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), layer.weight.float(), layer.bias.float())
