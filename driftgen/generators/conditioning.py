"""What a generator is told beside the Gaussian noise: class, guidance strength, style; and the parts in
float32 that it enters through."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["AlphaEmbedding", "Conditioning", "RMSNorm", "float32_linear"]


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
