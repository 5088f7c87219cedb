"""A small multilayer perceptron, the generator of the paper's 2-D toys."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.base import check_draw
from driftgen.generators.option_checks import MOST_LAYERS
from driftgen.support.checked_arguments import checked
from driftgen.support.dense_tensors import check_tensor

__all__ = ["MLP"]


class MLP(nn.Module):
    """x = f(ε): map Gaussian noise ``[n, noise_dim]`` to samples ``[n, data_dim]`` in one call.

    Args:
        noise_dim: width C of the noise ε.
        data_dim: width D of a sample.
        hidden: width of the hidden layers.
        depth: number of hidden layers.
    """

    @checked
    def __init__(self, noise_dim: int = 32, data_dim: int = 2, hidden: int = 256, depth: int = 3) -> None:
        super().__init__()
        sizes = {"noise_dim": noise_dim, "data_dim": data_dim, "hidden": hidden, "depth": depth}
        for argument, size in sizes.items():
            most = MOST_LAYERS if argument == "depth" else 2**31
            if not 1 <= size <= most:
                raise InputError(f"{argument}={size} must be a whole number, at least 1 and at most {most:,}")
        self.noise_dim, self.data_dim = noise_dim, data_dim
        layers: list[nn.Module] = []
        width = noise_dim
        for _ in range(depth):
            layers += [nn.Linear(width, hidden), nn.SiLU()]
            width = hidden
        self.layers = nn.Sequential(*layers, nn.Linear(width, data_dim))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                # Preserves the variance through SiLU. PyTorch's smaller default starts as an almost linear
                # map, which is slow to split Gaussian noise into several modes.
                nn.init.normal_(layer.weight, std=1.7 / math.sqrt(layer.in_features))
                nn.init.zeros_(layer.bias)

    def forward(self, noise: Tensor) -> Tensor:
        """Return samples f(ε)."""
        weight = next(self.parameters())
        check_tensor("noise", noise, weight, floating=True)
        width = noise.shape[-1] if noise.ndim else 0
        if width != self.noise_dim:
            raise InputError(f"noise has width {width}, expected noise_dim={self.noise_dim}")
        result: Tensor = self.layers(noise.to(weight.dtype))
        return result

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw ε ~ N(0, I), ``[n, noise_dim]``, for the device of the weights.

        The noise is drawn on the device of ``generator``, or on the CPU: a seed gives the same samples
        wherever the weights are.
        """
        weight = next(self.parameters())
        check_draw(n, (self.noise_dim,), generator, weight.device)
        source = torch.device("cpu") if generator is None else generator.device
        return torch.randn(n, self.noise_dim, generator=generator, device=source).to(weight)

    @torch.no_grad()
    def place(self, center: Tensor, spread: float, generator: torch.Generator | None = None) -> None:
        """Rescale the last layer so that samples start around ``center`` with standard deviation ``spread``.

        Identical samples do not repel each other, so a generator must not start as a single point.
        """
        if spread <= 0:
            raise InputError(f"spread={spread} must be positive")
        samples = self(self.sample_noise(1024, generator))
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        factor = spread / samples.std(dim=0)
        last.weight *= factor[:, None]
        last.bias.copy_(center + (last.bias - samples.mean(dim=0)) * factor)
