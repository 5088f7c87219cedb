"""Augmentation: draws depend only on seed and position, and stay within the configured ranges."""

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data import decode
from driftgen.data.arrays import ArrayImages
from driftgen.data.augment import _affine, crop_resize, uniforms
from driftgen.training.config import Augment
from tests.support.image_data import EVERYTHING, every, noise


def pictures(n=6, height=12, width=16, **augment):
    pixels = torch.from_numpy(noise(n, 3, height, width))
    return ArrayImages(pixels, torch.zeros(n, dtype=torch.int64), ["a"], Augment(**augment), channels=3)


def test_uniform_rows_depend_only_on_their_index():
    table = uniforms(3, 1, 0, 200, 5)
    for first, n in ((0, 1), (7, 3), (150, 50), (20, 0)):
        assert torch.equal(uniforms(3, 1, first, n, 5), table[first : first + n])
    assert not torch.equal(uniforms(4, 1, 0, 200, 5), table)
    assert not torch.equal(uniforms(3, 2, 0, 200, 5), table)


@pytest.mark.parametrize("augment", [{}, {"flip": True}, EVERYTHING])
def test_augmentation_depends_only_on_seed_and_position(augment):
    data = pictures(**augment)
    which = torch.tensor([0, 3, 3, 5, 1, 0, 2])
    once = data.load(which, 9)
    parts = torch.cat([data.load(which[:2], 9), data.load(which[2:], 9, 2)])
    torch.testing.assert_close(once, parts, rtol=0, atol=1e-6)
    if augment:
        assert not torch.equal(once, data.load(which, 8))
        assert once.abs().max() <= 1 + 1e-6


def test_flips_are_horizontal_with_probability_one_half():
    plain, data = pictures(1), pictures(1, flip=True)
    data.pixels = plain.pixels
    image = every(plain)[0]
    drawn = data.load(torch.zeros(400, dtype=torch.int64), 0)
    flipped = (drawn == image.flip(2)).all(dim=(1, 2, 3))
    straight = (drawn == image).all(dim=(1, 2, 3))
    assert (flipped | straight).all()
    assert 150 < int(flipped.sum()) < 250


def test_affine_transforms_stay_within_their_ranges():
    """The position of a bright dot shows rotation, zoom and shift; all come close to their limits."""
    y, x = torch.meshgrid(torch.arange(41.0), torch.arange(61.0), indexing="ij")
    dot = 255 * torch.exp(-((x - 40) ** 2 + (y - 20) ** 2) / 8)
    pixels = dot.to(torch.uint8)[None, None]

    def place(**augment):
        data = ArrayImages(pixels, torch.zeros(1, dtype=torch.int64), ["a"], Augment(**augment))
        drawn = data.load(torch.zeros(300, dtype=torch.int64), 0)[:, 0] + 1
        mass = drawn.sum((1, 2))
        return (drawn * x).sum((1, 2)) / mass - 30, (drawn * y).sum((1, 2)) / mass - 20

    across, down = place(rotate=30)
    angle = torch.rad2deg(torch.atan2(down, across))
    assert angle.abs().max() < 30.5
    assert angle.min() < -27
    assert angle.max() > 27
    torch.testing.assert_close(across**2 + down**2, torch.full((300,), 100.0), rtol=0.05, atol=0)
    across, down = place(zoom=0.3)
    assert 6.9 < across.min() < 7.4
    assert 12.6 < across.max() < 13.1
    assert down.abs().max() < 0.1
    across, down = place(shift=4)
    assert 5.9 < across.min() < 6.4
    assert 13.6 < across.max() < 14.1
    assert -4.1 < down.min() < -3.6
    assert 3.6 < down.max() < 4.1
    assert abs(float(torch.corrcoef(torch.stack([across, down]))[0, 1])) < 0.2


def test_affine_transforms_rotate_before_they_shift():
    image = torch.zeros(1, 1, 41, 61)
    image[0, 0, 20, 40] = 1  # 10 to the right of the center
    turned = _affine(image, Augment(rotate=90, shift=4), torch.tensor([[1.0, 0.0, 1.0, 0.5]]))
    assert turned[0, 0, 20 + 10 + 2, 30 + 4] > 0.99


def test_random_crops_respect_area_and_aspect_ratio():
    table = np.random.default_rng(0).random((4000, decode.CROP_UNIFORMS))
    left, top, width, height = decode.crop_boxes(300, 200, table, (0.2, 1.0)).T
    assert left.min() >= 0
    assert top.min() >= 0
    assert (left + width).max() <= 300
    assert (top + height).max() <= 200
    share, ratio = width * height / 60_000, width / height
    assert 0.19 < share.min() < 0.22
    assert share.max() > 0.8
    assert 0.73 < ratio.min() < 0.78
    assert 1.29 < ratio.max() < 1.36
    assert abs(np.log(ratio).mean()) < 0.05
    # No crop fits into such a narrow image: the center is used.
    assert decode.crop_boxes(10, 1000, table[:3], (0.9, 1.0)).tolist() == [[0, 493, 10, 13]] * 3
    assert decode.crop_boxes(1000, 10, table[:3], (0.9, 1.0)).tolist() == [[493, 0, 13, 10]] * 3


def test_batched_crops_match_pillow():
    images = torch.from_numpy(noise(5, 3, 30, 40) // 2 + 64)  # leaves room for overshoot without clipping
    boxes = torch.tensor([[0, 0, 40, 30], [5, 3, 20, 10], [1, 2, 7, 28], [39, 29, 1, 1], [10, 0, 30, 30]])
    got = crop_resize(images.float(), boxes, (12, 12)).clamp(0, 255)
    for image, (left, top, width, height), result in zip(images, boxes.tolist(), got, strict=True):
        part = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + width, top + height))
        expected = np.asarray(part.resize((12, 12), Image.Resampling.BICUBIC))
        error = result.permute(1, 2, 0) - torch.from_numpy(expected.copy())
        assert error.abs().max() <= 1.2  # Pillow rounds twice
