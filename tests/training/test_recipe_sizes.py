"""Sizes of the recipes for one's own images."""

import pytest
import torch

from driftgen.errors import InputError
from driftgen.training.build import build_generator, build_mae
from driftgen.training.recipe_sizes import SIZES, choose_size, few_images, size_note, size_overrides
from driftgen.training.recipes import load_recipe

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def never(size):
    raise AssertionError(f"{size} was measured")


@pytest.mark.parametrize("size", SIZES[1:])
def test_every_size_builds_an_encoder_and_a_generator_for_the_same_images(size):
    train = load_recipe("folder", size_overrides("folder", size), "train")
    encoder = load_recipe("mae-folder", size_overrides("mae-folder", size), "pretrain")
    assert train.data.size == encoder.data.size
    shape = (3, train.data.size, train.data.size)
    mae = build_mae(encoder.mae, shape, 4)
    assert mae.features(torch.zeros(1, *shape), **{})
    with torch.device("meta"):
        assert build_generator(train.generator, shape, 4).config.num_classes == 4
    assert encoder.mae.finetune_steps <= encoder.optim.steps
    assert size_note(size)


def test_user_changes_win_over_the_size():
    config = load_recipe("folder", [*size_overrides("folder", "tiny"), "optim.lr=0.5", "data.size=16"])
    assert (config.optim.lr, config.data.size) == (0.5, 16)


def test_only_base_needs_a_gpu():
    for name in ("folder", "mae-folder"):
        small = [load_recipe(name, size_overrides(name, size)) for size in ("tiny", "small", "base")]
        assert [c.compile for c in small] == [False, False, True]
        assert [c.precision for c in small] == ["float32", "float32", "bfloat16"]


def test_base_is_the_recipe_whose_result_is_stated():
    """The figures of tiny-imagenet are those of a run of folder at this size."""
    own = {"about", "expect", "encoders"}
    for name, stated in (("folder", "tiny-imagenet"), ("mae-folder", "mae-tiny-imagenet")):
        sized = load_recipe(name, size_overrides(name, "base"))
        assert sized.model_dump(exclude=own) == load_recipe(stated).model_dump(exclude=own)


def test_few_images_turn_augmentation_on():
    augment = load_recipe("folder", few_images("folder")).data.augment
    assert augment.flip
    assert min(augment.rotate, augment.zoom, augment.shift) > 0


@pytest.mark.parametrize(
    ("device", "machine", "seconds", "size", "word"),
    [
        (GPU, {"memory": 24 * 2**30}, None, "base", "24 GiB"),
        (GPU, {"memory": 8 * 2**30}, None, "small", "8 GiB"),
        (CPU, {"cores": 2}, None, "tiny", "2 CPU cores"),
        (CPU, {"cores": 1}, None, "tiny", "1 CPU core"),
        (CPU, {"cores": 64}, 3600.0, "small", "1.0 hours"),
        (CPU, {"cores": 64}, 36000.0, "tiny", "10.0 hours"),
    ],
)
def test_auto_chooses_by_device_and_measured_time(device, machine, seconds, size, word):
    choice = choose_size(device, never if seconds is None else lambda size: seconds, **machine)
    assert choice.value == size
    assert word in choice.reason


def test_auto_measures_nothing_without_data():
    assert choose_size(CPU, None, cores=64).value == "tiny"


@pytest.mark.parametrize(("recipe", "size"), [("cifar10", "tiny"), ("folder", "huge")])
def test_unknown_sizes_are_one_line(recipe, size):
    with pytest.raises(InputError, match=size) as error:
        size_overrides(recipe, size)
    assert "\n" not in str(error.value)
