"""Images <-> latents: SD-VAE and tiny autoencoders through diffusers, identity for pixels."""

from driftgen.tokenizers.from_options import build_tokenizer
from driftgen.tokenizers.identity import Identity
from driftgen.tokenizers.protocol import Tokenizer
from driftgen.tokenizers.sd_vae import SDVAE
from driftgen.tokenizers.tiny_vae import TinyVAE

__all__ = ["SDVAE", "Identity", "TinyVAE", "Tokenizer", "build_tokenizer"]
