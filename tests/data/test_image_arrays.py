"""Images in memory: the packaged digits, and arrays of any layout, dtype and labels."""

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data import decode
from driftgen.data.arrays import from_arrays
from driftgen.data.images import digits, open_images
from driftgen.errors import InputError
from driftgen.training.config import Data
from tests.support.helpers import fails
from tests.support.image_data import every, noise, opening, to_bytes

opened = pytest.fixture(opening)


def array(tmp_path, **arrays):
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    return str(path)


# The packaged digits


def test_digits_are_complete_and_their_split_is_fixed():
    (train, train_labels), (heldout, heldout_labels), (images, labels) = map(
        digits, ("train", "heldout", "all")
    )
    assert images.shape == (1797, 1, 8, 8)
    assert train.shape == (1437, 1, 8, 8)
    assert heldout.shape == (360, 1, 8, 8)
    assert set((images * 8 + 8).unique().tolist()) == set(range(17))
    # Known properties of the dataset: the count of each digit, and the first image, a zero.
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:5].tolist() == [0, 1, 2, 3, 4]
    assert (images[0, 0, 0] * 8 + 8).tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    assert heldout_labels.bincount().tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    rows = {bytes(to_bytes(image).numpy()) for image in train}
    assert not any(bytes(to_bytes(image).numpy()) in rows for image in heldout)
    # Published results depend on the split: it must never change.
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


def test_digits_and_their_license_are_shipped():
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
def test_dtypes_of_arrays(tmp_path, opened, convert):
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


def test_color_and_transparency_of_arrays_match_pillow(tmp_path, opened):
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
    assert data.labels.tolist() == [2, 1, 0, 0]  # the first of each class, then the second of the first class
    np.testing.assert_array_equal(to_bytes(every(data)).numpy(), pixels[[0, 1, 3, 4]].transpose(0, 3, 1, 2))


def test_size_of_an_array_is_a_center_crop(tmp_path, opened):
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
    "0 ... 255 as uint8": {"images": GOOD.astype(np.float32)},
    "nan": {"images": np.full((4, 5, 5), np.nan)},
    "type complex": {"images": GOOD.astype(complex)},
    "holds no images": {"images": GOOD[:0]},
    "images have 0x5 pixels": {"images": GOOD[:, :0]},
    "labels have shape \\[3\\]": {"images": GOOD, "labels": np.arange(3)},
    "labels have dtype float": {"images": GOOD, "labels": np.arange(4.0)},
    "a label is -1": {"images": GOOD, "labels": np.arange(4) - 1},
    "no image has label 2": {"images": GOOD, "labels": np.array([0, 1, 3, 3])},
    "without gaps": {"images": GOOD, "labels": np.array([0, 1, 3, 10**9])},
    "2 class_names": {"images": GOOD, "labels": np.arange(4), "class_names": np.array(["a", "b"])},
    "cannot be read as an array": {"images": np.array([{"a": 1}], dtype=object)},
}


def test_a_single_number_is_no_image():
    fails(lambda: from_arrays(np.ones(()), None, Data()), "holds no images")


@pytest.mark.parametrize("message", BAD_ARRAYS)
def test_wrong_arrays_are_one_line_errors(tmp_path, message):
    path = array(tmp_path, **BAD_ARRAYS[message])
    fails(lambda: open_images(Data(path=path)), message)


def test_wrong_paths_are_one_line_errors(tmp_path):
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
        fails(lambda options=options: open_images(Data(**options)), message)
