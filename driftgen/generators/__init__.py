"""Generators f(ε, c, α): networks that map noise to samples in one call."""

from driftgen.generators.base import Generator, Noise
from driftgen.generators.chunk_mlp import ChunkMLP, ChunkMLPConfig
from driftgen.generators.conv_decoder import ConvDecoder, ConvDecoderConfig
from driftgen.generators.dit import DiT, DiTConfig
from driftgen.generators.image_mlp import ImageMLP, ImageMLPConfig
from driftgen.generators.mlp import MLP
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.generators.transformer import ChunkTransformer, ChunkTransformerConfig
from driftgen.generators.unet import UNet2D, UNet2DConfig
from driftgen.generators.unet1d import UNet1D, UNet1DConfig

__all__ = [
    "MLP",
    "ChunkMLP",
    "ChunkMLPConfig",
    "ChunkTransformer",
    "ChunkTransformerConfig",
    "ConvDecoder",
    "ConvDecoderConfig",
    "DiT",
    "DiTConfig",
    "Generator",
    "ImageMLP",
    "ImageMLPConfig",
    "Noise",
    "PolicyNetwork",
    "UNet1D",
    "UNet1DConfig",
    "UNet2D",
    "UNet2DConfig",
]
