"""Generators f(ε, c, α): networks that map noise to samples in one call."""

from driftgen.generators.base import Generator, Noise
from driftgen.generators.conv_decoder import ConvDecoder, ConvDecoderConfig
from driftgen.generators.dit import DiT, DiTConfig
from driftgen.generators.image_mlp import ImageMLP, ImageMLPConfig
from driftgen.generators.mlp import MLP
from driftgen.generators.unet import UNet2D, UNet2DConfig

__all__ = [
    "MLP",
    "ConvDecoder",
    "ConvDecoderConfig",
    "DiT",
    "DiTConfig",
    "Generator",
    "ImageMLP",
    "ImageMLPConfig",
    "Noise",
    "UNet2D",
    "UNet2DConfig",
]
