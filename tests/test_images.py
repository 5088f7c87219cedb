import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data import decode
from driftgen.data.arrays import ArrayImages
from driftgen.data.augment import _affine, crop_resize, uniforms
from driftgen.data.images import digits, open_images
from driftgen.errors import InputError
from driftgen.training.config import Augment, Data

RNG = np.random.default_rng(0)


def noise(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def every(data, seed=0):
    return data.load(torch.arange(len(data.labels)), seed)


def to_bytes(images):
    return ((images + 1) * 127.5).round().to(torch.uint8)


def array(tmp_path, **arrays):
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    return str(path)


@pytest.fixture
def folder(tmp_path):
    """Two classes of smooth pictures of many sizes, among things that are no pictures."""
    for name, count in (("dogs", 7), ("cats", 5)):
        place = tmp_path / "data" / name
        place.mkdir(parents=True)
        for i in range(count):
            small = Image.fromarray(noise(4, 5, 3))
            small.resize((40 + 9 * i, 70 - 6 * i), Image.Resampling.BICUBIC).save(place / f"{i:02}.png")
    (tmp_path / "data" / "dogs" / "notes.txt").write_text("good boys")
    (tmp_path / "data" / "dogs" / ".hidden.png").write_text("not a picture")
    (tmp_path / "data" / ".cache").mkdir()
    (tmp_path / "data" / "README").write_text("pets")
    return tmp_path / "data"


@pytest.fixture
def opened():
    """Opens images, and closes them at the end."""
    some = []

    def call(path=None, **options):
        some.append(open_images(Data(path=None if path is None else str(path), **options)))
        return some[-1]

    yield call
    for data in some:
        data.close()


# The packaged digits


def test_digits_are_all_there_and_split_for_good():
    (train, train_labels), (heldout, heldout_labels), (images, labels) = map(
        digits, ("train", "heldout", "all")
    )
    assert images.shape == (1797, 1, 8, 8)
    assert train.shape == (1437, 1, 8, 8)
    assert heldout.shape == (360, 1, 8, 8)
    assert set((images * 8 + 8).unique().tolist()) == set(range(17))
    # Known facts of the data set: how often each digit comes, and its first image, a zero.
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:5].tolist() == [0, 1, 2, 3, 4]
    assert (images[0, 0, 0] * 8 + 8).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert heldout_labels.bincount().tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    rows = {bytes(to_bytes(image).numpy()) for image in train}
    assert not any(bytes(to_bytes(image).numpy()) in rows for image in heldout)
    # The split is part of what a published figure means: it must never change.
    assert int((train_labels * torch.arange(1437)).sum() % 1_000_003) == 670_582
    with pytest.raises(InputError, match="did you mean 'heldout'"):
        digits("held-out")


def test_digits_as_data_are_the_training_part(opened):
    data = opened(kind="digits")
    assert data.shape == (1, 8, 8)
    assert data.class_names == list("0123456789")
    assert torch.equal(every(data), digits("train")[0])
    assert torch.equal(data.labels, digits("train")[1])
    larger = opened(kind="digits", size=16)
    assert larger.shape == (1, 16, 16)
    assert (torch.nn.functional.avg_pool2d(every(larger), 2) - every(data)).abs().mean() < 0.15


def test_digits_and_their_licence_are_shipped():
    from importlib.resources import files

    text = files("driftgen.data").joinpath("digits-LICENSE.txt").read_text()
    assert "Alpaydin" in text
    assert "CC BY 4.0" in text


# Arrays


LAYOUTS = {
    "gray": (noise(6, 5, 7), lambda a: a[:, None]),
    "channels last": (noise(6, 5, 7, 3), lambda a: a.transpose(0, 3, 1, 2)),
    "channels first": (noise(6, 3, 5, 7), lambda a: a),
    "gray, channels last": (noise(6, 5, 7, 1), lambda a: a.transpose(0, 3, 1, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_arrays(tmp_path, opened, layout):
    pixels, first = LAYOUTS[layout]
    data = opened(array(tmp_path, images=pixels))
    assert data.shape == (3, 5, 7)
    assert data.class_names == ["images"]
    expected = np.broadcast_to(first(pixels), (6, 3, 5, 7))
    np.testing.assert_array_equal(to_bytes(every(data)).numpy(), expected)
    assert every(data).min() >= -1
    assert every(data).max() <= 1


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a.astype(np.int64),
        lambda a: (a / 255).astype(np.float32),
        lambda a: (a / 127.5 - 1).astype(np.float64),
        lambda a: np.maximum(a - 0.4, 0) / 255,  # to the nearest byte
        lambda a: (a / 255).astype(np.float16),
    ],
)
def test_number_types_of_arrays(tmp_path, opened, convert):
    pixels = noise(6, 5, 7, 3)
    data = opened(array(tmp_path, x=convert(pixels)))
    error = np.abs(to_bytes(every(data)).numpy().astype(int) - pixels.transpose(0, 3, 1, 2))
    assert error.max() <= (0 if convert(pixels).dtype != np.float16 else 1)


def test_booleans_are_black_and_white(tmp_path, opened):
    data = opened(array(tmp_path, x=np.eye(4, dtype=bool)[None]), channels=1)
    assert torch.equal(every(data)[0, 0], 2 * torch.eye(4) - 1)


def test_npy_is_one_class(tmp_path, opened):
    np.save(tmp_path / "faces.npy", noise(3, 4, 4, 3))
    data = opened(tmp_path / "faces.npy")
    assert data.class_names == ["faces"]
    assert data.labels.tolist() == [0, 0, 0]


def test_colour_and_transparency_of_arrays_are_as_pillow_has_them(tmp_path, opened):
    pixels = noise(5, 6, 6, 4)
    rgb = [decode.convert(Image.fromarray(image), 3) for image in pixels]
    data = opened(array(tmp_path, images=pixels))
    error = to_bytes(every(data)).int() - torch.from_numpy(np.stack(rgb)).permute(0, 3, 1, 2).int()
    assert error.abs().max() <= 1
    gray = np.stack([np.asarray(image.convert("L")) for image in rgb])
    data = opened(array(tmp_path, images=np.stack(rgb)), channels=1)
    assert (to_bytes(every(data))[:, 0].int() - torch.from_numpy(gray).int()).abs().max() <= 1


def test_labels_and_names_of_arrays(tmp_path, opened):
    pixels = noise(6, 4, 4, 3)
    labels = np.array([2, 0, 1, 1, 0, 2])
    data = opened(array(tmp_path, x_train=pixels, y_train=labels[:, None], x_test=pixels[:1]))
    assert data.labels.tolist() == labels.tolist()
    assert data.class_names == ["0", "1", "2"]
    data = opened(array(tmp_path, images=pixels, labels=labels, class_names=np.array(["a", "b", "c"])))
    assert data.class_names == ["a", "b", "c"]
    data = opened(array(tmp_path, images=pixels, labels=np.array(["x", "w", "x", "v", "v", "w"])))
    assert data.class_names == ["v", "w", "x"]
    assert data.labels.tolist() == [2, 1, 2, 0, 0, 1]
    assert opened(tmp_path / "images.npz", conditional=False).class_names == ["all"]
    data = opened(tmp_path / "images.npz", limit=4)
    assert data.labels.tolist() == [2, 1, 0, 0]  # the first of each, then the second of the first
    np.testing.assert_array_equal(to_bytes(every(data)).numpy(), pixels[[0, 1, 3, 4]].transpose(0, 3, 1, 2))


def test_size_of_an_array_is_the_centre_crop(tmp_path, opened):
    pixels = noise(3, 70, 90, 3)
    data = opened(array(tmp_path, images=pixels), size=16)
    assert data.shape == (3, 16, 16)
    expected = np.stack([np.asarray(decode.center_crop(Image.fromarray(image), 16)) for image in pixels])
    assert torch.equal(to_bytes(every(data)), torch.from_numpy(expected).permute(0, 3, 1, 2))


GOOD = noise(4, 5, 5, 3)
BAD_ARRAYS = {
    "expected under images": {"pictures": GOOD},
    "shape \\[4, 5\\]": {"images": noise(4, 5)},
    "with c from 1 to 4": {"images": noise(4, 9, 9, 9)},
    "0 ... 255 for integers": {"images": GOOD.astype(np.int32) * 9},
    "only 0 and 1": {"images": GOOD % 2},
    "0 ... 255 as bytes": {"images": GOOD.astype(np.float32)},
    "nan": {"images": np.full((4, 5, 5), np.nan)},
    "type complex": {"images": GOOD.astype(complex)},
    "holds no images": {"images": GOOD[:0]},
    "labels have shape \\[3\\]": {"images": GOOD, "labels": np.arange(3)},
    "labels are of type float": {"images": GOOD, "labels": np.arange(4.0)},
    "a label is -1": {"images": GOOD, "labels": np.arange(4) - 1},
    "no image has label 2": {"images": GOOD, "labels": np.array([0, 1, 3, 3])},
    "without gaps": {"images": GOOD, "labels": np.array([0, 1, 3, 10**9])},
    "2 class_names": {"images": GOOD, "labels": np.arange(4), "class_names": np.array(["a", "b"])},
    "cannot be read as an array": {"images": np.array([{"a": 1}], dtype=object)},
}


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_wrong_arrays_are_told_in_one_line(tmp_path, message):
    path = array(tmp_path, **BAD_ARRAYS[message])
    with pytest.raises(InputError, match=message) as error:
        open_images(Data(path=path))
    assert "\n" not in str(error.value)


def test_wrong_paths_are_told_in_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.zip").write_bytes(b"PK")
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut short")
    (tmp_path / "a.npy").write_bytes(b"")
    for options, message in (
        ({}, "data.path is missing"),
        ({"path": str(tmp_path / "nowhere")}, "no such file or folder"),
        ({"path": str(tmp_path / "a.zip")}, "expected a folder"),
        ({"path": str(tmp_path / "a.npz")}, "cannot be read as an array"),
        ({"path": str(tmp_path / "a.npy")}, "cannot be read as an array"),
        ({"path": str(tmp_path / "empty"), "size": 8}, "holds no images"),
        ({"path": str(tmp_path / "empty")}, "data.size is missing"),
        ({"kind": "latents"}, "latents"),
        ({"kind": "digits", "limit": 9}, "data.limit=9 is below the 10 classes"),
    ):
        with pytest.raises(InputError, match=message) as error:
            open_images(Data(**options))
        assert "\n" not in str(error.value)


# Augmentation


def pictures(n=6, height=12, width=16, **augment):
    pixels = torch.from_numpy(noise(n, 3, height, width))
    return ArrayImages(pixels, torch.zeros(n, dtype=torch.int64), ["a"], Augment(**augment), channels=3)


EVERYTHING = {"flip": True, "crop": "random-resized", "rotate": 20, "zoom": 0.2, "shift": 2}


def test_uniform_rows_depend_on_their_number_only():
    table = uniforms(3, 1, 0, 200, 5)
    for first, n in ((0, 1), (7, 3), (150, 50), (20, 0)):
        assert torch.equal(uniforms(3, 1, first, n, 5), table[first : first + n])
    assert not torch.equal(uniforms(4, 1, 0, 200, 5), table)
    assert not torch.equal(uniforms(3, 2, 0, 200, 5), table)


@pytest.mark.parametrize("augment", [{}, {"flip": True}, EVERYTHING])
def test_augmentation_depends_on_seed_and_position_only(augment):
    data = pictures(**augment)
    which = torch.tensor([0, 3, 3, 5, 1, 0, 2])
    once = data.load(which, 9)
    parts = torch.cat([data.load(which[:2], 9), data.load(which[2:], 9, 2)])
    torch.testing.assert_close(once, parts, rtol=0, atol=1e-6)
    if augment:
        assert not torch.equal(once, data.load(which, 8))
        assert once.abs().max() <= 1 + 1e-6


def test_flips_are_left_right_and_half_of_the_time():
    plain, data = pictures(1), pictures(1, flip=True)
    data.pixels = plain.pixels
    image = every(plain)[0]
    drawn = data.load(torch.zeros(400, dtype=torch.int64), 0)
    flipped = (drawn == image.flip(2)).all(dim=(1, 2, 3))
    straight = (drawn == image).all(dim=(1, 2, 3))
    assert (flipped | straight).all()
    assert 150 < int(flipped.sum()) < 250


def test_affine_changes_move_by_what_was_asked_for():
    """A bright dot right of the middle of a wide image: turned, enlarged and moved within the limits, and
    reaching near all of them.
    """
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


def test_affine_changes_turn_first_then_move():
    image = torch.zeros(1, 1, 41, 61)
    image[0, 0, 20, 40] = 1  # 10 to the right of the middle
    turned = _affine(image, Augment(rotate=90, shift=4), torch.tensor([[1.0, 0.0, 1.0, 0.5]]))
    assert turned[0, 0, 20 + 10 + 2, 30 + 4] > 0.99


def test_random_crops_keep_the_share_and_the_ratio():
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
    # Nothing fits into so narrow an image: the middle of it is taken.
    assert decode.crop_boxes(10, 1000, table[:3], (0.9, 1.0)).tolist() == [[0, 493, 10, 13]] * 3
    assert decode.crop_boxes(1000, 10, table[:3], (0.9, 1.0)).tolist() == [[493, 0, 13, 10]] * 3


def test_cropping_many_at_once_is_what_pillow_does():
    images = torch.from_numpy(noise(5, 3, 30, 40) // 2 + 64)  # what overshoots needs no clipping
    boxes = torch.tensor([[0, 0, 40, 30], [5, 3, 20, 10], [1, 2, 7, 28], [39, 29, 1, 1], [10, 0, 30, 30]])
    got = crop_resize(images.float(), boxes, (12, 12)).clamp(0, 255)
    for image, (left, top, width, height), result in zip(images, boxes.tolist(), got, strict=True):
        part = Image.fromarray(image.permute(1, 2, 0).numpy()).crop((left, top, left + width, top + height))
        expected = np.asarray(part.resize((12, 12), Image.Resampling.BICUBIC))
        error = result.permute(1, 2, 0) - torch.from_numpy(expected.copy())
        assert error.abs().max() <= 1.2  # Pillow rounds twice


# Folders


def test_folders_are_classes(folder, opened):
    data = opened(folder, size=16, workers=0)
    assert data.class_names == ["cats", "dogs"]
    assert data.labels.tolist() == [0] * 5 + [1] * 7
    assert data.shape == (3, 16, 16)
    assert data.unreadable == []
    images = every(data)
    with Image.open(folder / "dogs" / "03.png") as image:
        expected = np.asarray(decode.center_crop(image, 16))
    assert torch.equal(to_bytes(images[8]), torch.from_numpy(expected.copy()).permute(2, 0, 1))
    assert opened(folder, size=16, workers=0, conditional=False).class_names == ["all"]
    limited = opened(folder, size=16, workers=0, limit=3)
    assert limited.labels.tolist() == [0, 0, 1]
    assert torch.equal(every(limited), images[[0, 1, 5]])
    flat = opened(folder / "dogs", size=16, workers=0)
    assert flat.class_names == ["dogs"]
    assert torch.equal(every(flat), images[5:])


def test_images_in_deeper_folders_belong_to_the_class(folder, opened):
    (folder / "dogs" / "more").mkdir()
    (folder / "dogs" / "00.png").rename(folder / "dogs" / "more" / "00.JPEG")
    assert opened(folder, size=8, workers=0).labels.bincount().tolist() == [5, 7]


@pytest.mark.parametrize("augment", [{}, EVERYTHING])
def test_worker_processes_give_what_one_process_gives(folder, opened, augment):
    options = {"size": 16, "augment": Augment(**augment)}
    alone, helped = opened(folder, workers=0, **options), opened(folder, workers=2, **options)
    which = torch.arange(12).repeat(3)
    assert torch.equal(alone.load(which, 4), helped.load(which, 4))
    assert torch.equal(alone.load(which, 4, 30), helped.load(which, 4, 30))
    parts = torch.cat([helped.load(which[:5], 4), helped.load(which[5:], 4, 5)])
    torch.testing.assert_close(parts, alone.load(which, 4), rtol=0, atol=1e-6)
    if augment:
        assert not torch.equal(alone.load(which, 4), alone.load(which, 5))


def test_adm_centre_crop():
    """A picture of its own coordinates: which part is kept can be read off it."""
    x, y = np.meshgrid(np.linspace(0, 255, 400), np.linspace(0, 255, 100))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).round().astype(np.uint8))
    got = np.asarray(decode.center_crop(image, 16)).astype(float)
    assert got.shape == (16, 16, 3)
    assert abs(got[..., 0].mean() - 127.5) < 2
    assert abs(got[0, 0, 0] - 255 * 156.25 / 400) < 4  # the middle fourth
    assert abs(got[0, 0, 1] - 255 / 32) < 3
    rough = noise(64, 64, 3)  # halved twice: the mean over blocks, rounded four times
    got = np.asarray(decode.center_crop(Image.fromarray(rough), 16)).astype(float)
    assert np.abs(got - rough.reshape(16, 4, 16, 4, 3).mean((1, 3))).max() <= 2.5
    small = Image.fromarray(noise(5, 7, 3))
    assert decode.center_crop(small, 16).size == (16, 16)


RED = (200, 30, 60)


def _palette():
    image = Image.new("P", (20, 20), 1)
    image.putpalette([0, 0, 0, *RED])
    return image


ODD = {
    "gray.png": (Image.new("L", (20, 20), 100), (100, 100, 100)),
    "bits.png": (Image.new("1", (20, 20), 1), (255, 255, 255)),
    "palette.png": (_palette(), RED),
    "palette.gif": (_palette(), RED),
    "cmyk.jpg": (Image.new("CMYK", (20, 20), (0, 255, 255, 0)), (254, 0, 0)),
    "cmyk.tif": (Image.new("CMYK", (20, 20), (0, 255, 255, 0)), (255, 0, 0)),
    "deep.png": (Image.fromarray(np.full((20, 20), 100 * 257, np.uint16)), (100, 100, 100)),
    "deep.tif": (Image.fromarray(np.full((20, 20), 100 * 257, np.int32)), (100, 100, 100)),
    "float.tif": (Image.fromarray(np.full((20, 20), 100 / 255, np.float32)), (100, 100, 100)),
    "alpha.png": (Image.new("RGBA", (20, 20), (*RED, 255)), RED),
    "clear.png": (Image.new("RGBA", (20, 20), (*RED, 0)), (255, 255, 255)),
    "half.png": (Image.new("LA", (20, 20), (0, 128)), (127, 127, 127)),
    "web.webp": (Image.new("RGB", (20, 20), RED), RED),
    "tiny.bmp": (Image.new("RGB", (1, 1), RED), RED),
    "wide.png": (Image.new("RGB", (300, 2), RED), RED),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_modes(tmp_path, opened, name):
    image, colour = ODD[name]
    options = {"lossless": True} if name.endswith("webp") else {}
    image.save(tmp_path / name, **options)
    got = to_bytes(every(opened(tmp_path, size=8, workers=0)))[0].float().mean((1, 2))
    assert (got - torch.tensor(colour, dtype=torch.float32)).abs().max() <= 2
    gray = to_bytes(every(opened(tmp_path, size=8, workers=0, channels=1)))
    assert gray.shape == (1, 1, 8, 8)
    expected = float(np.dot(colour, [0.299, 0.587, 0.114]))
    assert (gray.float() - expected).abs().max() <= 2


def test_transparent_colour_of_a_palette_is_white(tmp_path, opened):
    _palette().save(tmp_path / "a.png", transparency=1)
    assert (every(opened(tmp_path, size=8, workers=0)) == 1).all()


def test_photographs_are_turned_upright(tmp_path, opened):
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by a quarter to the right
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    image = every(opened(tmp_path, size=8, workers=0))[0]
    assert (image[:, :, 5:] > 0.9).all()
    assert (image[:, :, :3] < -0.9).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_named_and_replaced(folder, opened, workers):
    good = opened(folder, size=16, workers=0)
    before = every(good)
    (folder / "dogs" / "02.png").write_bytes(b"no picture at all")
    data = opened(folder, size=16, workers=workers)
    assert len(data.unreadable) == 1
    assert "02.png (UnidentifiedImageError" in data.unreadable[0]
    assert data.labels.bincount().tolist() == [5, 6]
    assert torch.equal(every(data), before[[0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]])


@pytest.mark.parametrize("workers", [0, 2])
def test_damage_inside_an_image_is_found_when_it_is_decoded(folder, opened, workers):
    before = every(opened(folder, size=16, workers=0))
    path = folder / "dogs" / "06.png"
    path.write_bytes(path.read_bytes()[:200])
    data = opened(folder, size=16, workers=workers)
    assert data.unreadable == []
    images = every(data)
    assert len(data.unreadable) == 1
    assert "06.png" in data.unreadable[0]
    assert torch.equal(images[:11], before[:11])
    assert torch.equal(images[11], before[5])  # the class's last is damaged, its first takes the place
    assert torch.equal(every(data), images)
    assert len(data.unreadable) == 1
    other = folder / "dogs" / "00.png"
    other.write_bytes(other.read_bytes()[:200])
    with pytest.raises(InputError, match=r"2 of 12 images cannot be read, more than 1%.*06\.png"):
        every(data)


def test_the_next_image_of_the_class_takes_the_place(folder, opened):
    before = every(opened(folder, size=16, workers=0))
    path = folder / "dogs" / "03.png"
    path.write_bytes(path.read_bytes()[:200])
    assert torch.equal(every(opened(folder, size=16, workers=0))[8], before[9])


def test_one_percent_is_tolerated_and_more_is_not(tmp_path):
    for i in range(200):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{i:03}.bmp")
    for i in range(3):
        (tmp_path / f"{i * 50:03}.bmp").write_bytes(b"BM")
        if i < 2:
            data = open_images(Data(path=str(tmp_path), size=4, workers=0))
            assert len(data.unreadable) == i + 1
            assert len(data.labels) == 199 - i
    with pytest.raises(
        InputError, match=r"3 of 200 images cannot be read.*000\.bmp.*050\.bmp.*100\.bmp"
    ) as e:
        open_images(Data(path=str(tmp_path), size=4, workers=0))
    assert "\n" not in str(e.value)


def test_wrong_folders_are_told(folder):
    (folder / "birds").mkdir()
    with pytest.raises(InputError, match=r"class folder .*birds holds no images"):
        open_images(Data(path=str(folder), size=8))
    (folder / "birds" / "a.png").write_bytes(b"none")
    with pytest.raises(InputError, match="none of the images of class birds"):
        open_images(Data(path=str(folder), size=8))
    (folder / "dogs" / "00.png").rename(folder / "stray.png")
    with pytest.raises(InputError, match=r"beside class folders, such as stray\.png"):
        open_images(Data(path=str(folder), size=8))


# Worker processes


def children():
    """Decoding processes that run now, whosoever they are."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return {int(pid): int(parent) for pid, parent, args in rows if args.rstrip().endswith("data/decode.py")}


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not set(pids) & set(children()):
            return True
        time.sleep(0.05)
    return False


def test_closing_ends_the_workers(folder, opened):
    data = opened(folder, size=8, workers=2)
    mine = [process.pid for process in data._workers._all]
    assert set(mine) <= set(children())
    data.close()
    data.close()
    assert gone(mine)


def test_workers_die_with_the_process_that_is_killed(folder):
    """And a script without a guard around its main part can use them."""
    script = (
        "import sys, time, torch\n"
        "from driftgen.data.images import open_images\n"
        "from driftgen.training.config import Data\n"
        "data = open_images(Data(path=sys.argv[1], size=8, workers=2))\n"
        "data.load(torch.arange(12), 0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    workers = [pid for pid, parent in children().items() if parent == process.pid]
    assert len(workers) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(workers)


def test_a_worker_that_is_killed_is_told_and_signals_of_the_group_are_not_its_own(folder, opened):
    data = opened(folder, size=8, workers=1)
    before = every(data)
    pid = data._workers._all[0].pid
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert torch.equal(every(data), before)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(InputError, match=r"worker process ended .*00\.png.*lower data\.workers") as error:
        every(data)
    assert "\n" not in str(error.value)
