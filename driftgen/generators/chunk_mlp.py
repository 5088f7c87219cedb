"""ChunkMLP: a generator of action chunks without convolutions or attention, for small machines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.errors import OptionError, unknown_name
from driftgen.generators.chunks import TimeEmbedding, check_chunks, draw_chunk_noise
from driftgen.generators.option_checks import check_sizes, check_types
from driftgen.ops.compile import compile_blocks
from driftgen.support.checked_arguments import checked

__all__ = ["ChunkMLP", "ChunkMLPConfig"]


@dataclass(frozen=True)
class ChunkMLPConfig:
    """Options of a :class:`ChunkMLP`.

    Attributes:
        action_size: width A of an action.
        horizon: actions T of a chunk.
        condition_size: width C of one observation token.
        observed: observation tokens K; the network reads them side by side.
        hidden_size: width of the residual stream.
        depth: number of residual blocks.
        expansion: width of a block's hidden layer, in multiples of hidden_size.
        time_size: width of the embedding of a diffusion time step; 0 for a one-step generator.
    """

    action_size: int = 2
    horizon: int = 16
    condition_size: int = 20
    observed: int = 2
    hidden_size: int = 512
    depth: int = 4
    expansion: int = 2
    time_size: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, {"time_size": 0})
        if self.time_size % 2:
            raise OptionError(f"time_size={self.time_size} is odd", {"time_size": self.time_size + 1})


PRESETS: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 256, "depth": 3},
    "base": {},
}


class ResidualLayers(nn.Module):
    """x + W₂ GELU(W₁ LayerNorm(x))."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner, self.outer = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.outer(nn.functional.gelu(self.inner(self.norm(x))))
        return out


class ChunkMLP(nn.Module):
    """a = f(ε, o): map a noise chunk ``[B, T, A]`` to a chunk of actions of the same shape in one call.

    The noise, the observation tokens and, with ``time_size``, a diffusion time step enter one vector, which
    residual layers transform. Each weight is used once per chunk, those of a :class:`UNet1D` once per time
    step, so it is many times cheaper at the same number of parameters.

    Args:
        config: the options; the defaults of :class:`ChunkMLPConfig` if None.
        options: fields of :class:`ChunkMLPConfig` that replace those of ``config``.
    """

    config: ChunkMLPConfig

    @checked
    def __init__(self, config: ChunkMLPConfig | None = None, **options: Any) -> None:
        super().__init__()
        for option in options:
            if option not in ChunkMLPConfig.__dataclass_fields__:
                raise unknown_name("option", option, ChunkMLPConfig.__dataclass_fields__)
        c = self.config = replace(config or ChunkMLPConfig(), **options)
        h, chunk = c.hidden_size, c.horizon * c.action_size
        self.action, self.condition = nn.Linear(chunk, h), nn.Linear(c.observed * c.condition_size, h)
        self.time = TimeEmbedding(c.time_size) if c.time_size else None
        self.time_input = nn.Linear(c.time_size, h) if c.time_size else None
        self.layers = nn.ModuleList(ResidualLayers(h, c.expansion * h) for _ in range(c.depth))
        self.final_norm, self.output = nn.LayerNorm(h), nn.Linear(h, chunk)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, **options: Any) -> ChunkMLP:
        """Build a network of one of two sizes: ``small`` or ``base``."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize matrices to preserve the variance and biases with zeros.

        Noise and observations matter from the first step on: identical chunks do not repel each other, so a
        generator that starts as a constant stays one. Chunks start with standard deviation near 0.5.
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.output.weight, std=0.5 / math.sqrt(self.config.hidden_size))

    def compile_parts(self) -> None:
        """Compile the residual layers."""
        compile_blocks(self, ResidualLayers)

    def forward(self, noise: Tensor, condition: Tensor, time: Tensor | None = None) -> Tensor:
        """Return chunks ``[B, T, A]``; the arguments are those of :meth:`UNet1D.forward`."""
        c = self.config
        check_chunks(c, noise, condition, time, next(self.parameters()))
        dtype = self.output.weight.dtype
        x = self.action(noise.to(dtype).flatten(1)) + self.condition(condition.to(dtype).flatten(1))
        if self.time is not None and self.time_input is not None and time is not None:
            x = x + self.time_input(self.time(time))
        for layer in self.layers:
            x = layer(x)
        with torch.autocast(x.device.type, enabled=False):  # actions need more than the 8 bits of bfloat16
            flat = self.output(self.final_norm(x.to(dtype)))
        chunks: Tensor = flat.unflatten(1, (c.horizon, c.action_size))
        return chunks

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise chunks, see :func:`~driftgen.generators.chunks.draw_chunk_noise`."""
        return draw_chunk_noise(self.config, n, generator, self.output.weight.device)
