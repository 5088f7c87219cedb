"""Common part of the tokenizers: input checks, batching and a frozen network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.support.atomic_write import honor_umask

__all__ = ["DTYPES", "FrozenTokenizer"]

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


class FrozenTokenizer(nn.Module):
    """A tokenizer whose network never changes.

    No parameter requires a gradient and ``train()`` has no effect. Gradients still flow to the images or
    latents. The network runs in the dtype and on the device of its weights, ``batch_size`` images at a time.
    Subclasses implement ``_encode`` and ``_decode``.
    """

    kind: ClassVar[str]
    known: ClassVar[tuple[str, ...]] = ("scale", "batch_size", "dtype")
    network: Any
    _encode: Callable[..., Tensor]
    _decode: Callable[[Tensor], Tensor]

    def __init__(
        self,
        network: nn.Module | None,
        channels: tuple[int, int],
        factor: int,
        source: str | None = None,
        scale: float = 1.0,
        batch_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not scale > 0:
            raise InputError(f"scale={scale} must be above 0")
        if batch_size < 1:
            raise InputError(f"batch_size={batch_size} must be at least 1")
        if dtype not in DTYPES.values():
            raise InputError(f"dtype={dtype} must be one of {', '.join(DTYPES)}")
        self.image_channels, self.latent_channels = channels
        self.factor, self.source = factor, source
        self.scale, self.batch_size = float(scale), batch_size
        # The method of diffusers warns about modules that should stay in float32, even if there are none.
        self.network = None if network is None else nn.Module.to(network, dtype)
        self.requires_grad_(False)
        self.train(False)

    def encode(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Encode ``[B, C, H, W]`` in [-1, 1] as ``[B, latent_channels, H / factor, W / factor]``.

        With a seeded ``generator`` the latent of image i does not depend on how the images are batched.
        """
        _check("images", images, self.image_channels)
        (n, _, h, w), f = images.shape, self.factor
        if h % f or w % f or not h * w:
            raise InputError(f"images are {h}x{w} pixels: crop or resize them to multiples of {f}")
        noise = self._noise((n, self.latent_channels, h // f, w // f), generator)
        return self._batched(self._encode, images, noise)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents into images ``[B, C, H, W]`` of about [-1, 1]; clipping would stop gradients."""
        _check("latents", latents, self.latent_channels)
        return self._batched(self._decode, latents)

    def options(self) -> dict[str, Any]:
        """Return the JSON-serializable options for :func:`~driftgen.tokenizers.build_tokenizer`.

        ``source`` is a repository on the Hub, or None for weights loaded from a local folder. Such weights
        travel to another machine through :meth:`save`.
        """
        dtype = str(next(self.parameters()).dtype).removeprefix("torch.")
        record = {"kind": self.kind, "source": self.source, "scale": self.scale}
        return {**record, "batch_size": self.batch_size, "dtype": dtype}

    def save(self, folder: str | Path) -> None:
        """Write the weights as safetensors in their current dtype."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        # By default diffusers would store the local path that the weights were loaded from.
        self.network.register_to_config(_name_or_path=self.source or "")
        self.network.save_pretrained(folder, safe_serialization=True)
        for path in Path(folder).iterdir():
            honor_umask(path)

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor | None:
        return None

    def _batched(self, call: Callable[..., Tensor], x: Tensor, noise: Tensor | None = None) -> Tensor:
        like = next(self.parameters())
        if torch.compiler.is_exporting():  # the size of the batch is not known
            return call(x.to(like))
        outputs = []
        for start in range(0, max(len(x), 1), self.batch_size):
            rows = slice(start, start + self.batch_size)
            extra = () if noise is None else (noise[rows].to(like),)
            outputs.append(call(x[rows].to(like), *extra))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _check(argument: str, x: Tensor, channels: int) -> None:
    if x.ndim != 4 or x.shape[1] != channels or 0 in x.shape[2:]:
        raise InputError(f"{argument} has shape {list(x.shape)}, expected [B, {channels}, H, W]")
    if not x.is_floating_point():
        hint = "convert to floating point in [-1, 1], x / 127.5 - 1" if argument == "images" else "convert it"
        raise InputError(f"{argument} is {x.dtype}, not floating point: {hint}")
