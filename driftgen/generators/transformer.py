"""ChunkTransformer: a transformer generator of action chunks with cross-attention to observations."""

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

__all__ = ["ChunkTransformer", "ChunkTransformerConfig"]


@dataclass(frozen=True)
class ChunkTransformerConfig:
    """Options of a :class:`ChunkTransformer`.

    Attributes:
        action_size: width A of an action.
        horizon: actions T of a chunk, one token each.
        condition_size: width C of one observation token.
        observed: observation tokens K.
        hidden_size: width of the tokens.
        depth: number of decoder layers.
        heads: attention heads; divides hidden_size.
        causal: actions attend to earlier actions only.
        time_size: width of the embedding of a diffusion time step; 0 for a one-step generator.
    """

    action_size: int = 2
    horizon: int = 16
    condition_size: int = 20
    observed: int = 2
    hidden_size: int = 256
    depth: int = 8
    heads: int = 4
    causal: bool = False
    time_size: int = 0

    def __post_init__(self) -> None:
        check_types(self)
        check_sizes(self, {"time_size": 0})
        if self.hidden_size % self.heads:
            fitting = {"heads": math.gcd(self.hidden_size, self.heads)}
            raise OptionError(f"heads={self.heads} does not divide hidden_size={self.hidden_size}", fitting)
        if self.time_size % 2:
            raise OptionError(f"time_size={self.time_size} is odd", {"time_size": self.time_size + 1})


PRESETS: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "depth": 4},
    "base": {},
    "diffusion-policy": {"hidden_size": 256, "depth": 8, "causal": True},
}


class ChunkTransformer(nn.Module):
    """a = f(ε, o): map a noise chunk ``[B, T, A]`` to a chunk of actions of the same shape in one call.

    Each action is a token. Decoder layers (pre-norm, GELU) attend to the other actions and to the observation
    tokens. With ``time_size`` a diffusion time step is one more token to attend to.

    Args:
        config: the options; the defaults of :class:`ChunkTransformerConfig` if None.
        options: fields of :class:`ChunkTransformerConfig` that replace those of ``config``.
    """

    config: ChunkTransformerConfig

    @checked
    def __init__(self, config: ChunkTransformerConfig | None = None, **options: Any) -> None:
        super().__init__()
        for option in options:
            if option not in ChunkTransformerConfig.__dataclass_fields__:
                raise unknown_name("option", option, ChunkTransformerConfig.__dataclass_fields__)
        c = self.config = replace(config or ChunkTransformerConfig(), **options)
        h = c.hidden_size
        self.action, self.condition = nn.Linear(c.action_size, h), nn.Linear(c.condition_size, h)
        self.action_position = nn.Parameter(torch.empty(c.horizon, h))
        self.condition_position = nn.Parameter(torch.empty(c.observed, h))
        self.time = TimeEmbedding(c.time_size) if c.time_size else None
        self.time_token = nn.Linear(c.time_size, h) if c.time_size else None
        self.layers = nn.ModuleList(
            nn.TransformerDecoderLayer(
                h, c.heads, 4 * h, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(c.depth)
        )
        self.final_norm, self.output = nn.LayerNorm(h), nn.Linear(h, c.action_size)
        self.reset_parameters()

    @classmethod
    @checked
    def preset(cls, name: str, **options: Any) -> ChunkTransformer:
        """Build a network of one of three sizes: ``small``, ``base``, or that of Diffusion Policy."""
        if name not in PRESETS:
            raise unknown_name("preset", name, PRESETS)
        return cls(**{**PRESETS[name], **options})

    def reset_parameters(self) -> None:
        """Initialize matrices to preserve the variance, positions with standard deviation 0.1 and biases with
        zeros.

        Noise and observations matter from the first step on: identical chunks do not repel each other, so a
        generator that starts as a constant stays one. Chunks start with standard deviation near 0.5.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("position"):
                nn.init.normal_(parameter, std=0.1)
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.output.weight, std=0.5 / math.sqrt(self.config.hidden_size))

    def compile_parts(self) -> None:
        """Compile the decoder layers."""
        compile_blocks(self, nn.TransformerDecoderLayer)

    def forward(self, noise: Tensor, condition: Tensor, time: Tensor | None = None) -> Tensor:
        """Return chunks ``[B, T, A]``; the arguments are those of :meth:`UNet1D.forward`."""
        c = self.config
        check_chunks(c, noise, condition, time, next(self.parameters()))
        dtype = self.output.weight.dtype
        context = self.condition(condition.to(dtype)) + self.condition_position
        if self.time is not None and self.time_token is not None and time is not None:
            context = torch.cat([context, self.time_token(self.time(time))[:, None]], dim=1)
        x = self.action(noise.to(dtype)) + self.action_position
        mask = None
        if c.causal:
            mask = torch.ones(c.horizon, c.horizon, dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, context, tgt_mask=mask)
        with torch.autocast(x.device.type, enabled=False):  # actions need more than the 8 bits of bfloat16
            chunks: Tensor = self.output(self.final_norm(x.to(dtype)))
        return chunks

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw noise chunks, see :func:`~driftgen.generators.chunks.draw_chunk_noise`."""
        return draw_chunk_noise(self.config, n, generator, self.output.weight.device)
