"""Images that a GPU indexes and augments are those that the host loads."""

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data.arrays import ArrayImages, to_float
from driftgen.data.class_batches import StepSizes, open_source
from driftgen.data.config import Augment, Data, Queue
from driftgen.data.images import open_images
from driftgen.data.placement import is_on_gpu, place_data
from driftgen.errors import InputError

CPU = torch.device("cpu")
FLIP = Augment(flip=True)
MOVED = Augment(flip=True, rotate=10, zoom=0.1, shift=1)
CROPPED = Augment(flip=True, crop="random-resized")


def images(augment=FLIP, colors=3, **options):
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 256, (60, colors, 6, 6), dtype=np.uint8))
    return ArrayImages(pixels, torch.arange(60) % 3, ["a", "b", "c"], augment, **options)


@pytest.mark.parametrize("half", [127.5, 8])
def test_the_table_has_the_bits_of_the_division(half):
    data = images(Augment(), half=half)
    expected = torch.arange(256, dtype=torch.uint8).float() / half - 1
    assert torch.equal(data.levels, expected)
    chosen = torch.tensor([5, 5, 59])
    assert torch.equal(data.load(chosen, 0), to_float(data.pixels[chosen], half))


def test_moving_data_leaves_the_original_as_it_is():
    data = images()
    placed = data.to(torch.device("meta"))
    assert placed.pixels.is_meta
    assert placed.levels.is_meta
    assert not data.pixels.is_meta
    assert placed.shape == data.shape


def test_what_is_placed(tmp_path):
    data = images()
    assert place_data(data, Data(), CPU) is data
    assert place_data(data, Data(on_device=False), CPU) is data
    placed = place_data(data, Data(on_device=True), CPU)
    assert placed is not data
    assert torch.equal(placed.load(torch.arange(9), 3), data.load(torch.arange(9), 3))
    assert not is_on_gpu(placed)
    with pytest.raises(InputError, match=r"queue\.kind=queue holds samples in host memory"):
        place_data(data, Data(on_device=True), CPU, queue=True)
    folder = tmp_path / "class"
    folder.mkdir()
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    files = open_images(Data(path=str(tmp_path), size=4, workers=0))
    with pytest.raises(InputError, match="the data is read from files"):
        place_data(files, Data(on_device=True), CPU)
    assert place_data(files, Data(), CPU) is files


def test_which_augmentation_is_exact():
    assert images(FLIP).is_exact_on_gpu
    assert not images(MOVED).is_exact_on_gpu
    assert not images(CROPPED).is_exact_on_gpu


@pytest.mark.cuda
@pytest.mark.parametrize("colors", [1, 3])
def test_a_gpu_returns_the_same_bits(colors):
    data = images(FLIP, colors, channels=3)  # gray images are repeated to three channels
    placed = place_data(data, Data(), torch.device("cuda"))
    assert is_on_gpu(placed)
    chosen = torch.arange(59, -1, -1)
    for seed, first in ((0, 0), (4, 7)):
        loaded = placed.load(chosen, seed, first)
        assert loaded.is_cuda
        assert torch.equal(loaded.cpu(), data.load(chosen, seed, first))


@pytest.mark.cuda
@pytest.mark.parametrize("augment", [MOVED, CROPPED])
def test_a_gpu_returns_other_augmentations_up_to_rounding(augment):
    data = images(augment, size=5) if augment is CROPPED else images(augment)
    assert place_data(data, Data(), torch.device("cuda")) is data
    placed = place_data(data, Data(on_device=True), torch.device("cuda"))
    chosen = torch.arange(60)
    torch.testing.assert_close(placed.load(chosen, 1).cpu(), data.load(chosen, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_draws_from_a_gpu_are_those_from_the_host():
    data, sizes = images(), StepSizes(4, 6, 3)
    placed = data.to(torch.device("cuda"))
    host, gpu = (open_source(d, sizes, Queue(), seed=3) for d in (data, placed))
    for step in (0, 5):
        for mine, other in zip(host.draw(step), gpu.draw(step), strict=True):
            assert torch.equal(mine, other.cpu())
