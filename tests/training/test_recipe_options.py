"""``driftgen train RECIPE --options``: every option of the networks, with type, default and meaning."""

import dataclasses
import inspect

import pytest
import torch

import driftgen as dg
from driftgen.features import ResNetMAE
from driftgen.generators import ConvDecoderConfig, DiTConfig, ImageMLPConfig, Noise, UNet2DConfig
from driftgen.support.option_docs import describe_options, documented_arguments
from driftgen.training.recipe_options import recipe_options
from driftgen.training.recipes import load_recipe, recipe_names

NAMES = [recipe.name for recipe in recipe_names()]


@pytest.mark.parametrize("config", [ConvDecoderConfig, DiTConfig, ImageMLPConfig, UNet2DConfig])
def test_every_field_of_a_generator_is_documented(config):
    meanings = documented_arguments(config.__doc__)
    assert list(meanings) == [field.name for field in dataclasses.fields(config)]
    assert all(meanings.values())


@pytest.mark.parametrize("function", [ResNetMAE, ResNetMAE.features, dg.features.Backbone.features])
def test_every_argument_of_an_encoder_is_documented(function):
    meanings = documented_arguments(function.__doc__)
    assert [n for n in inspect.signature(function).parameters if n != "self"] == list(meanings)


def test_a_section_of_a_docstring():
    text = """Do it.

    Example::

        f(a=1)

    Args:
        a: the first, which
            goes on here: with a colon.
        b: the second.

    Returns:
        c: no argument.
    """
    assert documented_arguments(text) == {
        "a": "the first, which goes on here: with a colon.",
        "b": "the second.",
    }
    assert documented_arguments(None) == documented_arguments("Nothing.") == {}


def test_types_and_defaults_as_a_recipe_writes_them():
    class Net:
        """A network.

        Args:
            sizes: some sizes.
            rate: a rate.
        """

        def __init__(
            self,
            required: int,
            sizes: tuple[int, ...] = (1, 2),
            rate: float | None = None,
            on: bool = True,
            name: str = "x",
            **rest: object,
        ) -> None: ...

    assert [tuple(option) for option in describe_options(Net)] == [
        ("required", "int", "required", ""),
        ("sizes", "list of int", "[1, 2]", "some sizes."),
        ("rate", "float or null", "null", "a rate."),
        ("on", "bool", "true", ""),
        ("name", "str", "x", ""),
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_every_recipe_has_a_meaning(name):
    sections = recipe_options(load_recipe(name))
    assert sections
    for section in sections:
        assert section.options
        for option in section.options:
            assert option.meaning, (name, section.key, option.name)
            assert "\n" not in option.meaning


def listed(name, *changes):
    (section, *_) = recipe_options(load_recipe(name, ["data.path=x", *changes]))
    return section, {option.name: option for option in section.options}


def test_defaults_are_those_of_the_preset_and_of_the_recipe():
    section, options = listed("folder", "generator.options.groups=8")
    assert (section.key, section.about) == ("generator.options", "unet, preset 64px")
    assert options["widths"].default == "[64, 128, 192, 256, 384]"
    assert options["head_size"].default == "64"
    assert options["groups"].default == "8 (set here; otherwise 16)"
    assert options["input_size"].default == options["num_classes"].default == "from the data"
    _, options = listed("mae-folder")
    assert options["base_channels"].default == "64 (set here; otherwise 256)"
    assert options["mask_ratio"].default == "0.5"
    assert options["in_channels"].default == "from the data"


def test_the_encoder_of_a_recipe():
    _, encoder = recipe_options(load_recipe("folder", ["data.path=x", "encoders.0.switches.vectors=false"]))
    assert (encoder.key, encoder.about) == ("encoders.0.switches", "mae, arguments of features()")
    options = {option.name: option for option in encoder.options}
    assert options["vectors"].default == "false (set here; otherwise true)"
    assert options["patch_sizes"].default == "[2, 4]"


def test_a_network_of_ones_own():
    class Own(torch.nn.Module):
        """A generator.

        Args:
            strength: how strong.
        """

        def __init__(self, strength: float = 2.0, num_classes: int = 3) -> None:
            super().__init__()

        def sample_noise(self, n: int, generator: torch.Generator | None = None) -> Noise: ...

    dg.register_generator("own_net", Own)
    section, options = listed("digits", "generator={kind: own_net}")
    assert section.about == "own_net"
    assert tuple(options["strength"]) == ("strength", "float", "2.0", "how strong.")
    assert options["num_classes"].default == "from the data"


@pytest.mark.parametrize("columns", [60, 80])
@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["train", "--show", "folder", "--options"], ["generator.options", "encoders.0.switches"]),
        (["train", "imagenet256-latent-l2", "--options"], ["generator.options", "encoders.0.switches"]),
        (["pretrain", "mae-digits", "--options"], ["mae.options"]),
    ],
)
def test_the_command(words, keys, columns, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = here(*words)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    for key in keys:
        assert any(line.startswith(key) for line in lines)
    assert "…" not in done.stdout
    assert f"--set {keys[0]}." in done.stdout


@pytest.mark.parametrize(("size", "about"), [("tiny", "decoder, preset 32px"), ("base", "unet, preset 64px")])
def test_the_command_lists_the_networks_of_a_size(size, about, here):
    done = here("train", "folder", "--options", "--size", size)
    assert done.stdout.startswith(f"generator.options  {about}\n")


def test_an_unknown_preset_is_one_line(here):
    done = here("train", "folder", "--options", "--set", "generator.preset=63px")
    assert done.returncode == 2
    assert "preset='63px' is not known: did you mean '64px'?" in done.stderr
