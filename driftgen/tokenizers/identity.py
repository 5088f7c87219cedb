"""The tokenizer of pixel-space generators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.checked_arguments import checked
from driftgen.tokenizers.frozen_tokenizer import FrozenTokenizer

__all__ = ["Identity"]


class Identity(FrozenTokenizer):
    """Pixels as latents: returns its input in the same dtype and on the same device."""

    kind = "identity"

    @checked
    def __init__(self, channels: int = 3) -> None:
        if channels < 1:
            raise InputError(f"channels={channels} must be at least 1")
        super().__init__(None, (channels, channels), 1)

    def options(self) -> dict[str, Any]:
        """Return the kind and the number of channels."""
        return {"kind": self.kind, "channels": self.image_channels}

    def save(self, folder: str | Path) -> None:
        """Do nothing: there are no weights."""

    def _batched(self, call: Callable[..., Tensor], x: Tensor, noise: Tensor | None = None) -> Tensor:
        return x

    def _decode(self, latents: Tensor) -> Tensor:
        return latents

    _encode = _decode
