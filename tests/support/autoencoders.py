"""Small autoencoders for tests: diffusers networks, and state dicts in TAESD's layout."""

import torch
from safetensors.torch import save_file

from tests.support.libraries import import_library

# Latents of 3x5: torch draws normals 16 at a time, so multiples of 16 would hide the order of the draws.
X = torch.rand(5, 3, 12, 20, generator=torch.Generator().manual_seed(0)) * 2 - 1


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def close(a, b, tolerance=1e-5):
    return a.shape == b.shape and (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def kl_network(channels=4, levels=3):
    """Build diffusers' AutoencoderKL; every level but one halves the side."""
    diffusers = import_library("diffusers", "AutoencoderKL")
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(8,) * levels,
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=4,
        latent_channels=channels,
    ).eval()


def tiny_network():
    diffusers = import_library("diffusers", "AutoencoderTiny")
    torch.manual_seed(0)
    return diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
        latent_channels=5,
    ).eval()


def taesd_states(width=8, latent=6):
    """Return encoder and decoder state dicts with every kind of layer, including a skip and pools."""
    generator = seeded(1)

    def draw(*shape):
        fan = max(1, torch.Size(shape[1:]).numel())
        return torch.randn(shape, generator=generator) * (2 / fan) ** 0.5

    def conv(name, outputs, inputs, bias=True):
        return {f"{name}.weight": draw(outputs, inputs, 3, 3)} | (
            {f"{name}.bias": draw(outputs)} if bias else {}
        )

    def block(i, inputs, outputs, pool=False):
        state = conv(f"{i}.conv.0", outputs, inputs)
        state |= conv(f"{i}.conv.2", outputs, outputs) | conv(f"{i}.conv.4", outputs, outputs)
        if inputs != outputs:
            state |= {f"{i}.skip.weight": draw(outputs, inputs, 1, 1)}
        if pool:
            state |= {
                f"{i}.pool.0.weight": draw(4 * inputs, inputs, 1, 1),
                f"{i}.pool.1.weight": draw(4 * inputs),
                f"{i}.pool.1.bias": draw(4 * inputs),
                f"{i}.pool.3.weight": draw(inputs, 4 * inputs, 1, 1),
            }
        return state

    encoder = conv("0", width, 3) | block(1, width, width) | conv("2", width, width, bias=False)
    encoder |= block(3, width, 2 * width) | conv("4", 2 * width, 2 * width, bias=False)
    encoder |= block(5, 2 * width, width, pool=True) | conv("6", latent, width)
    decoder = conv("1", width, latent) | block(3, width, 2 * width, pool=True)
    decoder |= conv("5", width, 2 * width, bias=False) | block(6, width, width)
    decoder |= conv("8", width, width, bias=False) | block(9, width, width) | conv("10", 3, width)
    return encoder, decoder


def taesd_files(folder):
    """Write the encoder as a pickle and the decoder as safetensors; return both paths."""
    encoder, decoder = taesd_states()
    torch.save(encoder, folder / "x_encoder.pth")
    save_file(decoder, folder / "x_decoder.safetensors")
    return folder / "x_encoder.pth", folder / "x_decoder.safetensors"
