"""The tokenizer interface, and a check of arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.checked_arguments import show_value

__all__ = ["Tokenizer", "check_tokenizer"]


@runtime_checkable
class Tokenizer(Protocol):
    """Maps images to latents and back. Any object with these members qualifies; no base class is needed.

    Attributes:
        latent_channels: channels of a latent.
        factor: downsampling factor of each image side.
    """

    latent_channels: int
    factor: int

    def encode(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode ``[B, 3, H, W]`` in [-1, 1] as ``[B, latent_channels, H / factor, W / factor]``."""

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents into images. Values are not clipped to [-1, 1], so gradients are never cut off."""

    def options(self) -> dict[str, Any]:
        """Return the JSON-serializable options for :func:`~driftgen.tokenizers.build_tokenizer`."""

    def save(self, folder: Path) -> None:
        """Write the weights to ``folder`` for :func:`~driftgen.tokenizers.build_tokenizer`."""


def check_tokenizer(tokenizer: Any, channels: int | None = None) -> None:
    """Raise unless the tokenizer is None, or decodes samples of so many channels (None: of any)."""
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "latent_channels"):
        raise InputError(f"tokenizer={show_value(tokenizer)} must have decode and latent_channels")
    if channels not in (None, tokenizer.latent_channels):
        raise InputError(
            f"the tokenizer decodes {tokenizer.latent_channels} channels, the generator produces {channels}"
        )
