"""Tiny autoencoders of the TAESD family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from driftgen.support.atomic_write import atomic_write
from driftgen.tokenizers.diffusers_loading import load_network, local_folder, require_diffusers
from driftgen.tokenizers.frozen_tokenizer import FrozenTokenizer
from driftgen.tokenizers.taesd import TinyAutoencoder

__all__ = ["TinyVAE"]

ENCODER, DECODER = "encoder.safetensors", "decoder.safetensors"


class TinyVAE(FrozenTokenizer):
    """A deterministic tiny autoencoder of the TAESD family: z = s E(x), x = D(z / s).

    Args:
        name_or_folder: a repository on the Hugging Face Hub or a folder of ``diffusers.AutoencoderTiny``, a
            folder written by :meth:`save`, or a pair of files as in :meth:`from_files`.
        scale: s; 1 keeps the latents of the network, whose standard deviation is about 1.
        batch_size: images encoded or decoded at a time.
        dtype: dtype of the network.
    """

    kind = "tiny"

    def __init__(
        self,
        name_or_folder: str | Path | tuple[str | Path, str | Path],
        *,
        scale: float = 1.0,
        batch_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        location, source = name_or_folder, None
        if not isinstance(location, tuple) and (Path(location) / ENCODER).is_file():
            location = (Path(location) / ENCODER, Path(location) / DECODER)
        network: Any
        if isinstance(location, tuple):
            network = TinyAutoencoder.from_files(*location)
            channels, factor = (network.image_channels, network.latent_channels), network.factor
        else:
            require_diffusers("TinyVAE")
            folder, source = local_folder(location)
            network = load_network("AutoencoderTiny", folder)
            channels = (network.config.in_channels, network.config.latent_channels)
            factor = 2 ** (len(network.config.encoder_block_out_channels) - 1)
        super().__init__(network, channels, factor, source, scale, batch_size, dtype)

    @classmethod
    def from_files(cls, encoder: str | Path, decoder: str | Path, **options: Any) -> TinyVAE:
        """Build from two state dicts as TAESD's author publishes them, ``.pth`` or ``.safetensors``."""
        return cls((encoder, decoder), **options)

    def save(self, folder: str | Path) -> None:
        """Write the weights as safetensors, in the layout that they were loaded from."""
        if not isinstance(self.network, TinyAutoencoder):
            return super().save(folder)
        destination = Path(folder)
        destination.mkdir(parents=True, exist_ok=True)
        for name, half in ((ENCODER, self.network.encoder), (DECODER, self.network.decoder)):
            state = {key: tensor.contiguous() for key, tensor in half.state_dict().items()}
            with atomic_write(destination / name) as scratch:
                save_file(state, scratch)

    # TinyAutoencoder returns tensors, diffusers returns output objects.
    def _encode(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        output = self.network.encode(images)
        latents: Tensor = output if isinstance(output, Tensor) else output.latents
        return self.scale * latents

    def _decode(self, latents: Tensor) -> Tensor:
        output = self.network.decode(latents / self.scale)
        images: Tensor = output if isinstance(output, Tensor) else output.sample
        return images
