"""Images <-> latents: SD-VAE and tiny autoencoders through diffusers, identity for pixels."""

from driftgen.tokenizers.autoencoders import SDVAE, Identity, TinyVAE, Tokenizer, build_tokenizer

__all__ = ["SDVAE", "Identity", "TinyVAE", "Tokenizer", "build_tokenizer"]
