import json

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from driftgen.support.sheets import KEY, Sheet, read_sheet, write_sheet


def pictures(count, size=(8, 8), channels=3):
    rng = np.random.default_rng(0)
    shape = (count, size[1], size[0]) + ((3,) if channels == 3 else ())
    return [Image.fromarray(pixels) for pixels in rng.integers(0, 256, shape, dtype=np.uint8)]


@pytest.mark.parametrize("size", [(8, 8), (32, 32), (20, 28), (80, 80)], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_images_are_cut_out_again_exactly(tmp_path, size, channels):
    images = pictures(7, size, channels)
    sheet = Sheet(images, 3, ("cat", "Ωmega & <dog>", "a name that is much longer than the row " * 3))
    read = read_sheet(write_sheet(tmp_path / "sheet.png", sheet))
    assert (read.columns, read.rows, tuple(read.row_names)) == (3, 3, tuple(sheet.row_names))
    assert len(read.images) == 7
    for mine, theirs in zip(images, read.images, strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))


def test_names_and_captions_survive_and_are_drawn(tmp_path):
    images = [Image.new("L", (64, 64), 255)] * 4
    plain = write_sheet(tmp_path / "plain.png", Sheet(images, 2))
    assert (np.asarray(Image.open(plain)) == 255).all()
    named = Sheet(images, 2, column_names=("sample", "nearest"), captions=("a", "b", "c", "d"))
    read = read_sheet(write_sheet(tmp_path / "named.png", named))
    assert tuple(read.column_names) == ("sample", "nearest")
    assert tuple(read.captions) == ("a", "b", "c", "d")
    drawn = np.asarray(Image.open(tmp_path / "named.png"))
    assert (drawn[:10] < 255).any()  # above the first row
    assert (drawn[-12:] < 255).any()  # below the last one
    for image in read.images:
        assert (np.asarray(image) == 255).all()  # and never on an image


def test_a_note_is_drawn_below_the_images(tmp_path):
    images = [Image.new("L", (64, 64), 255)] * 4
    for captions in ((), ("a", "b", "c", "d")):
        without = write_sheet(tmp_path / "a.png", Sheet(images, 2, captions=captions))
        path = write_sheet(tmp_path / "b.png", Sheet(images, 2, captions=captions, note="all images"))
        read = read_sheet(path)
        assert (read.note, tuple(read.captions), len(read.images)) == ("all images", captions, 4)
        above, drawn = np.asarray(Image.open(without)), np.asarray(Image.open(path))
        assert np.array_equal(drawn[: len(above)], above)
        assert (drawn[len(above) :] < 255).any()


def save(path, text):
    info = PngInfo()
    info.add_text(KEY, text)
    Image.new("L", (66, 66)).save(path, pnginfo=info)
    return path


LAYOUT = {"count": 1, "columns": 1, "zoom": 8, "cell": [64, 64], "pitch": [66, 66], "corner": [1, 1]}


def test_a_stored_layout_is_used(tmp_path):
    sheet = read_sheet(save(tmp_path / "x.png", json.dumps(LAYOUT | {"captions": ["x"]})))
    assert (sheet.images[0].size, sheet.captions) == ((8, 8), ("x",))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        json.dumps(LAYOUT | {"count": 2}),
        json.dumps(LAYOUT | {"columns": 0}),
        json.dumps(LAYOUT | {"zoom": 0}),
        json.dumps(LAYOUT | {"zoom": 7}),
        json.dumps(LAYOUT | {"corner": [-1, 0]}),
        json.dumps(LAYOUT | {"corner": [1]}),
        json.dumps(LAYOUT | {"cell": [1e400, 1]}),
        json.dumps(LAYOUT | {"count": 10**9, "columns": 10**9, "pitch": [0, 0]}),
        json.dumps(LAYOUT | {"row_names": ["a", "b"]}),
    ],
)
def test_a_layout_that_does_not_fit_is_ignored(tmp_path, text):
    sheet = read_sheet(save(tmp_path / "x.png", text))
    assert (len(sheet.images), sheet.images[0].size) == (1, (66, 66))


def test_files_that_are_no_images(tmp_path):
    assert read_sheet(tmp_path / "none.png") is None
    path = write_sheet(tmp_path / "cut.png", Sheet(pictures(4), 2))
    path.write_bytes(path.read_bytes()[:60])
    assert read_sheet(path) is None
