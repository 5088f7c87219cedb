"""Stable Diffusion's autoencoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from driftgen.tokenizers.diffusers_loading import load_network, local_folder, require_diffusers
from driftgen.tokenizers.frozen_tokenizer import FrozenTokenizer

__all__ = ["SDVAE"]


class SDVAE(FrozenTokenizer):
    """Stable Diffusion's autoencoder: z = s (μ(x) + σ(x) ε), x = D(z / s), without a shift.

    Args:
        name_or_folder: a repository on the Hugging Face Hub, or a folder of ``diffusers.AutoencoderKL``.
        sample: draw latents from the posterior, as the paper's release does, instead of using its mean μ.
        scale: s.
        batch_size: images encoded or decoded at a time.
        dtype: dtype of the network.
    """

    kind = "sd-vae"
    known = (*FrozenTokenizer.known, "sample")

    def __init__(
        self,
        name_or_folder: str | Path = "stabilityai/sd-vae-ft-mse",
        *,
        sample: bool = True,
        scale: float = 0.18215,
        batch_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        require_diffusers("SDVAE")
        folder, source = local_folder(name_or_folder)
        network = load_network("AutoencoderKL", folder)
        channels = (network.config.in_channels, network.config.latent_channels)
        factor = 2 ** (len(network.config.block_out_channels) - 1)
        super().__init__(network, channels, factor, source, scale, batch_size, dtype)
        self.sample = bool(sample)

    def options(self) -> dict[str, Any]:
        """Return the options of :class:`FrozenTokenizer` and ``sample``."""
        return {**super().options(), "sample": self.sample}

    def _noise(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor | None:
        if not self.sample:
            return None
        if generator is None:
            return torch.randn(shape, device=next(self.parameters()).device)
        noise = torch.empty(shape, device=generator.device)
        # One image at a time, so that the noise of image i does not depend on the batch size.
        for image in noise:
            image.normal_(generator=generator)
        return noise

    def _encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        posterior = self.network.encode(images).latent_dist
        latents: Tensor = posterior.mean if noise is None else posterior.mean + posterior.std * noise
        return self.scale * latents

    def _decode(self, latents: Tensor) -> Tensor:
        images: Tensor = self.network.decode(latents / self.scale).sample
        return images
