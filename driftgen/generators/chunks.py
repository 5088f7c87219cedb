"""Parts shared by the generators of action chunks: noise, time embedding, checks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.generators.base import check_draw
from driftgen.support.dense_tensors import check_tensor

__all__ = ["TimeEmbedding", "check_chunks", "draw_chunk_noise"]


def draw_chunk_noise(config: Any, n: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw noise chunks ε ~ N(0, I), ``[n, T, A]``, for a device.

    With a ``generator`` the noise is drawn on its device, chunk by chunk, so that chunk i of a seed does not
    depend on the batch size.
    """
    shape = (config.horizon, config.action_size)
    check_draw(n, shape, generator, device)
    if generator is None:
        return torch.randn(n, *shape, device=device)
    noise = torch.empty(n, *shape, device=generator.device)
    for chunk in noise:
        chunk.normal_(generator=generator)
    return noise.to(device)


class TimeEmbedding(nn.Module):
    """Embeds diffusion time steps: cosines and sines, then a hidden layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.Sequential(nn.Linear(size, 4 * size), nn.Mish(), nn.Linear(4 * size, size))

    def forward(self, time: Tensor) -> Tensor:
        half = self.size // 2
        rates = torch.exp(-math.log(10_000) / max(half - 1, 1) * torch.arange(half, device=time.device))
        angles = time[:, None].float() * rates
        embedded: Tensor = self.layers(torch.cat([angles.cos(), angles.sin()], dim=1).to(self._dtype))
        return embedded

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def check_chunks(config: Any, noise: Tensor, condition: Tensor, time: Tensor | None, weight: Tensor) -> None:
    """Raise InputError unless noise, observation tokens and time steps fit the options of a generator.

    ``weight`` is a parameter of the generator.
    """
    check_tensor("noise", noise, weight, floating=True)
    check_tensor("condition", condition, weight, floating=True)
    n = noise.shape[0] if noise.ndim else 0
    expected = {
        "noise": (noise, [n, config.horizon, config.action_size]),
        "condition": (condition, [n, config.observed, config.condition_size]),
    }
    for name, (tensor, shape) in expected.items():
        if list(tensor.shape) != shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}, expected {shape}")
    if time is not None:
        check_tensor("time", time, weight)
    if config.time_size and (time is None or list(time.shape) != [n]):
        got = "none" if time is None else f"shape {list(time.shape)}"
        raise InputError(f"time: {got} is given, the network takes one time step per chunk, [{n}]")
    if not config.time_size and time is not None:
        raise InputError("time is given, but time_size=0: build the network with time_size=128")
