"""Options that do not fit together: the message names the others, and its values fit."""

import random

import pytest
import torch

from driftgen.errors import InputError, OptionError
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.generators.conv_decoder import ConvDecoderConfig
from driftgen.generators.dit import DiTConfig
from driftgen.generators.image_mlp import ImageMLPConfig
from driftgen.generators.unet import UNet2DConfig
from driftgen.training.build import build_generator, build_mae
from driftgen.training.recipes import load_recipe
from tests.support.helpers import fails


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            UNet2DConfig,
            {"widths": (32, 64, 128), "head_size": 32},
            r"^widths has 3 levels, blocks has 4: set blocks=\[1,1,2\]$",
        ),
        (
            UNet2DConfig,
            {"blocks": (1, 2)},
            r"^widths has 4 levels, blocks has 2: set blocks=\[1,1,1,2\]$",
        ),
        (
            UNet2DConfig,
            {"attention_levels": (2, 4)},
            r"^widths has levels 0 to 3, attention_levels has 4: set attention_levels=\[2\]$",
        ),
        (
            UNet2DConfig,
            {"attention_levels": (7,)},
            r"attention_levels has 7: set attention_levels=\[3\]$",
        ),
        (
            UNet2DConfig,
            {"groups": 32},
            r"^widths has 48, which groups=32 does not divide: set groups=16$",
        ),
        (
            UNet2DConfig,
            {"attention_levels": (1,)},
            r"^widths has 96 at attention level 1, which head_size=64 does not divide: set head_size=32$",
        ),
        (
            UNet2DConfig,
            {"input_size": 28},
            r"^widths has 4 levels, but input_size=28 can be halved 2 times \(pad the images to 32, "
            r"or use fewer levels\): set widths=\[48,96,192\] and "
            r"blocks=\[1,1,2\]$",
        ),
        (
            UNet2DConfig,
            {"widths": (40, 80)},
            r"blocks has 4; .*attention_levels has 2; widths has 40, which groups=16 does not divide: set "
            r"blocks=\[1,2\] and attention_levels=\[1\] and groups=8 and head_size=16$",
        ),
        (
            ConvDecoderConfig,
            {"input_size": 30},
            r"^widths has 4 levels, but input_size=30 can be halved 1 times \(pad the images to 32, or use "
            r"fewer levels\): set widths=\[32,16\]$",
        ),
        (
            ConvDecoderConfig,
            {"groups": 12},
            r"^widths has 128, which groups=12 does not divide: set groups=4$",
        ),
        (DiTConfig, {"patch_size": 3}, r"^patch_size=3 does not divide input_size=32: set patch_size=2$"),
        (DiTConfig, {"num_heads": 5}, r"^num_heads=5 must divide hidden_size=768 .*: set num_heads=4$"),
        (
            DiTConfig,
            {"hidden_size": 126, "num_heads": 6},
            r"^hidden_size=126 must be a multiple of 4; num_heads=6 must divide .*: set hidden_size=128 and "
            r"num_heads=4$",
        ),
    ],
)
def test_the_others_are_named(config, options, message):
    fails(lambda: config(**options), message)


def random_options(rng, cls):
    if cls is UNet2DConfig:
        levels = [rng.randint(1, 6) for _ in range(2)]
        return {
            "input_size": rng.choice([7, 8, 12, 28, 32, 48, 64, 96]),
            "widths": [rng.choice([8, 20, 24, 32, 48, 64, 96, 100, 33]) for _ in range(levels[0])],
            "blocks": [rng.randint(1, 3) for _ in range(levels[1])],
            "attention_levels": rng.sample(range(7), rng.randint(0, 3)),
            "groups": rng.choice([1, 3, 8, 16, 32]),
            "head_size": rng.choice([16, 24, 32, 64]),
        }
    if cls is ConvDecoderConfig:
        return {
            "input_size": rng.choice([7, 8, 12, 28, 32, 48, 64, 96]),
            "widths": [rng.choice([8, 20, 24, 32, 48, 64, 33]) for _ in range(rng.randint(1, 6))],
            "groups": rng.choice([1, 3, 8, 16]),
        }
    return {
        "input_size": rng.choice([7, 8, 12, 32, 36]),
        "patch_size": rng.choice([1, 2, 3, 4, 5, 16, 40]),
        "hidden_size": rng.choice([1, 2, 6, 30, 33, 64, 96, 126, 384]),
        "num_heads": rng.choice([1, 2, 3, 5, 6, 12, 100]),
    }


@pytest.mark.parametrize("cls", [UNet2DConfig, ConvDecoderConfig, DiTConfig])
def test_what_a_message_suggests_fits(cls):
    rng, refused = random.Random(0), []
    for _ in range(500):
        options = random_options(rng, cls)
        try:
            cls(**options)
        except OptionError as error:
            refused.append((options, error.suggested))
    assert 100 < len(refused) < 500
    for options, suggested in refused:
        assert suggested
        assert not suggested.keys() & {"input_size", "in_channels", "num_classes"}  # those of the data
        cls(**options | suggested)  # raises nothing


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((8, 8), {"blocks": (1, 1, 1, 1, 1)}),
        ((8, 8), {"blocks": (2, 2, 2, 2), "patchify": 2}),
        ((28, 28), {"blocks": (1, 1), "patchify": 8}),
        ((30, 20), {"blocks": (1, 1, 1, 1, 1), "patchify": 4}),
        ((7, 7), {"blocks": (1, 1, 1, 1), "patchify": 2}),
        ((8, 8), {"base_channels": 4, "blocks": (1, 1, 1, 1)}),
        ((2, 2), {"blocks": (1,), "patchify": 4}),
    ],
)
def test_a_suggested_autoencoder_fits_its_images(size, options):
    images = torch.zeros(1, 3, *size)
    arguments = {"in_channels": 3, "base_channels": 40, "decoder": False} | options
    with pytest.raises(OptionError, match=rf"^x is {size[0]}x{size[1]} pixels: .*: set ") as error:
        ResNetMAE(**arguments).patches(images)
    ResNetMAE(**arguments | error.value.suggested).patches(images)


def test_a_recipe_names_the_whole_key():
    words = ["data.path=x", "generator.options.widths=[64,128,256]"]
    config = load_recipe("folder", words, "train")
    with pytest.raises(
        InputError,
        match=r"^widths has 3 levels, blocks has 5; .*: set generator.options.blocks=\[1,2,2\] and "
        r"generator.options.attention_levels=\[2\]$",
    ):
        build_generator(config.generator, (3, 64, 64), 4)
    changes = ["generator.options.blocks=[1,2,2]", "generator.options.attention_levels=[2]"]
    config = load_recipe(
        "folder", ["data.path=x", "generator.options.widths=[64,128,256]", *changes], "train"
    )
    build_generator(config.generator, (3, 64, 64), 4)


def test_a_pretraining_recipe_names_the_whole_key():
    config = load_recipe("mae-folder", ["data.path=x", "data.size=16", "mae.options.patchify=4"], "pretrain")
    fails(
        lambda: build_mae(config.mae, (3, 16, 16), None),
        r"^x is 16x16 pixels: 4 stages with patchify=4 need 32x32: set mae.options.blocks=\[2,2,2\]$",
    )


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (UNet2DConfig, {"widths": 64}, r"widths=64 must be a list of whole numbers, such as \[48, 96"),
        (UNet2DConfig, {"widths": ["a"]}, r"widths=\['a'\] must be a list of whole numbers"),
        (UNet2DConfig, {"widths": []}, "widths is empty"),
        (UNet2DConfig, {"blocks": [0, 1, 1, 1]}, "is too small: it must be at least 1"),
        (UNet2DConfig, {"attention_levels": [-1]}, "is too small: it must be at least 0"),
        (DiTConfig, {"rope": "yes"}, "rope='yes' must be true or false"),
        (DiTConfig, {"depth": 2.5}, "depth=2.5 must be a whole number, such as 12"),
        (DiTConfig, {"mlp_ratio": "4"}, "mlp_ratio='4' must be a number"),
        (DiTConfig, {"mlp_ratio": 0}, "mlp_ratio=0 is too small"),
        (DiTConfig, {"norm": "rsm"}, "norm='rsm' is not known: did you mean 'rms'"),
        (ImageMLPConfig, {"hidden_size": None}, "hidden_size=None must be a whole number"),
        (ImageMLPConfig, {"depth": True}, "depth=True must be a whole number"),
        (ImageMLPConfig, {"depth": 0}, "depth=0 is too small"),
    ],
)
def test_a_single_option_that_does_not_fit(config, options, message):
    fails(lambda: config(**options), message)


def test_large_sizes_are_answered_at_once():
    """A search through all sizes would take minutes."""
    size = 2**31 - 8
    fails(lambda: DiTConfig(hidden_size=size, num_heads=7), f"num_heads=7 must divide hidden_size={size}")
    fails(lambda: DiTConfig(input_size=2**31 - 1, patch_size=2**30), "does not divide .*: set patch_size=1$")
