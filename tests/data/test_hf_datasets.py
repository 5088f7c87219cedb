"""Hugging Face datasets: parquet files, save_to_disk, dataset objects, and wrong rows."""

import io
import struct
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data import decode
from driftgen.data.images import open_images
from driftgen.data.in_memory import DatasetImages, open_memory
from driftgen.data.latent_encoding import encode_images
from driftgen.tokenizers import Identity
from driftgen.training.config import Augment, Data
from driftgen.training.run_changes import resolve
from tests.support.helpers import fails
from tests.support.image_data import EVERYTHING, every, noise, opening, to_bytes

datasets = pytest.importorskip("datasets")
opened = pytest.fixture(opening)
IMAGES = [noise(20 + i, 30, 3) for i in range(6)]
LABEL = datasets.ClassLabel(names=["cat", "dog"])


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def encode(pixels):
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, "PNG")
    return {"bytes": body.getvalue(), "path": None}


def table(labels=(0, 1, 0, 1, 0, 1), feature=LABEL, images=None, **columns):
    images = [encode(pixels) for pixels in IMAGES] if images is None else images
    features = {"image": datasets.Image(), "label": feature}
    columns = {"image": images, "label": list(labels or ()), **columns}
    if labels is None:
        del features["label"], columns["label"]
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features))


def error(path, message, **options):
    fails(lambda: open_images(Data(path=str(path), size=8, workers=0, **options)), message)


def expected(size=16):
    crops = [np.asarray(decode.center_crop(Image.fromarray(pixels), size)) for pixels in IMAGES]
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_parquet_files(tmp_path, opened, workers):
    place = tmp_path / "pets"
    place.mkdir()
    rows = table()
    for part in range(2):
        rows.select(range(3 * part, 3 * part + 3)).to_parquet(place / f"train-0000{part}-of-00002.parquet")
    rows.to_parquet(place / "test-00000-of-00001.parquet")
    data = opened(place, size=16, workers=workers)
    assert (data.class_names, data.labels.tolist()) == (["cat", "dog"], [0, 1] * 3)
    assert torch.equal(to_bytes(every(data)), expected())
    assert (data.unreadable, data.notes) == ([], [f"{place}: split train; test left out"])
    assert len(opened(place / "test*.parquet", size=16, workers=0).labels) == 6
    assert len(opened(place / "train-00001-of-00002.parquet", size=16, workers=0).labels) == 3
    assert opened(place, size=16, workers=0, conditional=False).class_names == ["all"]
    assert opened(place, size=16, workers=0, limit=2).labels.tolist() == [0, 1]


def test_changed_files_are_read_again(tmp_path, opened):
    path = tmp_path / "a.parquet"
    table().to_parquet(path)
    before = every(opened(path, size=8, workers=0))
    table(images=[encode(255 - pixels) for pixels in IMAGES]).to_parquet(path)
    assert not torch.equal(every(opened(path, size=8, workers=0)), before)


def test_files_of_the_hub_lie_in_a_folder_named_data(tmp_path, opened):
    (tmp_path / "pets" / "data").mkdir(parents=True)
    (tmp_path / "pets" / "README.md").write_text("pets")
    table().to_parquet(tmp_path / "pets" / "data" / "train.parquet")
    assert len(opened(tmp_path / "pets", size=8, workers=0).labels) == 6


def test_save_to_disk(tmp_path, opened):
    table().save_to_disk(tmp_path / "plain")
    data = opened(tmp_path / "plain", size=16, workers=0)
    assert data.class_names == ["cat", "dog"]
    assert torch.equal(to_bytes(every(data)), expected())
    splits = datasets.DatasetDict(test=table().select([0, 1]), train=table())
    splits.save_to_disk(tmp_path / "splits")
    data = opened(tmp_path / "splits", size=16, workers=0)
    assert len(data.labels) == 6
    assert "split train; test left out" in data.notes[0]
    assert len(opened(tmp_path / "splits" / "test", size=16, workers=0).labels) == 2


def test_rows_without_metadata_of_the_library(tmp_path, opened):
    """Columns that pyarrow wrote: bytes, and names as labels."""
    import pyarrow
    import pyarrow.parquet

    rows = {"img": [encode(pixels)["bytes"] for pixels in IMAGES], "label": ["b", "a"] * 3, "text": ["x"] * 6}
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    data = opened(tmp_path / "a.parquet", size=16, workers=0)
    assert (data.class_names, data.labels.tolist()) == (["a", "b"], [1, 0] * 3)
    assert torch.equal(to_bytes(every(data)), expected())


def test_labels(tmp_path, opened):
    def classes(rows):
        rows.to_parquet(tmp_path / "a.parquet")
        data = opened(tmp_path / "a.parquet", size=8, workers=0)
        return data.class_names, data.labels.tolist(), data.notes

    number = datasets.Value("int64")
    where = tmp_path / "a.parquet"
    assert classes(table((3, 1, 3, 1, 3, 1), number))[:2] == (["1", "3"], [1, 0] * 3)
    rest = table([1] * 6)
    assert classes(rest) == (["dog"], [0] * 6, [f"{where}: no image of cat"])
    assert classes(rest.rename_column("label", "species"))[0] == ["dog"]
    none = [f"{where}: no column label, all images are of one class"]
    assert classes(table(None)) == (["all"], [0] * 6, none)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda: table((0, 1, None, 1, 0, 1)), r"a\.parquet row 2: label is 'None', expected a class number"),
        (lambda: table((0, 1, 0, -1, 0, 1)), r"row 3: label is '-1'"),
        (lambda: table([0.5] * 6, datasets.Value("float32")), r"row 0: label is '0\.5'"),
        (lambda: table([""] * 6, datasets.Value("string")), "row 0: label is ''"),
        (lambda: table().select([]), "holds no rows"),
        (
            lambda: table().rename_column("label", "fine").add_column("coarse", [0] * 6, feature=LABEL),
            "fine, coarse",
        ),
        (lambda: datasets.Dataset.from_dict({"text": ["a"]}), "has the columns text: name the column"),
        (
            lambda: datasets.Dataset.from_dict({"image": [3.5]}),
            "column image holds .*encoded images",
        ),
    ],
)
def test_wrong_rows_are_one_line(tmp_path, rows, message):
    rows().to_parquet(tmp_path / "a.parquet")
    error(tmp_path / "a.parquet", message)


def test_wrong_files_are_one_line(tmp_path, monkeypatch):
    place = tmp_path / "pets"
    place.mkdir()
    table().to_parquet(place / "a.parquet")
    (place / "b.parquet").write_bytes((place / "a.parquet").read_bytes()[:500])
    error(place, r"b\.parquet cannot be read as a parquet file: ArrowInvalid")
    table(None).to_parquet(place / "b.parquet")
    error(place, r"a\.parquet and .*b\.parquet have different columns \(label\)")
    saved = tmp_path / "saved"
    table().save_to_disk(saved)
    next(saved.glob("*.arrow")).write_bytes(b"none")
    error(saved, "saved cannot be read as a Hugging Face dataset: ")
    monkeypatch.setitem(sys.modules, "datasets", None)
    error(place, r"need datasets: pip install 'driftgen\[datasets\]'")


def test_damaged_texts_and_offsets_are_one_line(tmp_path):
    """Arrow does not decode such names, and ends the process at such offsets, if nothing checks them."""
    path = tmp_path / "a.parquet"
    table().to_parquet(path)
    path.write_bytes(path.read_bytes().replace(b"label", b"\xff" * 5))
    error(path, r"a\.parquet cannot be read as a parquet file: UnicodeDecodeError")
    words = ("a cat", "a dog") * 3
    for name, offsets in (("below zero", (0, 5, -7)), ("beyond the end", (0, 5, 2**30))):
        saved = tmp_path / name
        table(words, datasets.Value("string")).save_to_disk(saved)
        (file,) = saved.glob("*.arrow")
        right, wrong = (struct.pack("<3i", *values) for values in ((0, 5, 10), offsets))
        assert file.read_bytes().count(right) == 1
        file.write_bytes(file.read_bytes().replace(right, wrong))
        error(saved, "cannot be read as a Hugging Face dataset: ArrowInvalid")
    saved = tmp_path / "text"
    table(words, datasets.Value("string")).save_to_disk(saved)
    (file,) = saved.glob("*.arrow")
    file.write_bytes(file.read_bytes().replace(b"a dog", b"a \xff\xffg"))
    error(saved, "cannot be read as a Hugging Face dataset: ArrowInvalid: .*UTF8")


def test_a_format_that_leaves_columns_out_is_ignored(tmp_path, opened):
    rows = table()
    rows.set_format(columns=["label"])
    rows.save_to_disk(tmp_path / "saved")
    data = opened(tmp_path / "saved", size=16)
    assert torch.equal(to_bytes(every(data)), expected())
    assert data.labels.tolist() == [0, 1] * 3


def test_unreadable_images_are_named_and_replaced(tmp_path):
    images = [encode(IMAGES[0])] * 300
    images[7] = {"bytes": b"nothing", "path": None}
    images[8] = {"bytes": None, "path": str(tmp_path / "absent.png")}
    images[9] = {"bytes": images[0]["bytes"][:400], "path": None}
    data, _ = open_memory(table([0] * 300, images=images), Data(size=8, workers=0))
    where = "data"
    assert data.unreadable[0].startswith(f"{where} row 7 (UnidentifiedImageError: not a BMP, GIF, JPEG,")
    assert data.unreadable[1].startswith(f"{where} row 8 (FileNotFoundError")
    assert (every(data) == every(data)[0]).all()
    assert [name.split(" (")[0] for name in data.unreadable[2:]] == [f"{where} row 9"]


def test_a_dataset_object():
    """Decoded by worker processes like files; the recipe's size is that of images of different sizes."""
    data, config = open_memory(table(), Data(workers=2, augment=Augment(**EVERYTHING)), 16)
    again, _ = open_memory(table(), config.model_copy(update={"workers": 0}))
    assert (config.size, config.kind, config.memory.count) == (16, "memory", 6)
    assert data.class_names == ["cat", "dog"]
    assert torch.equal(every(data, 5), every(again, 5))
    data.close()
    assert torch.equal(every(data, 5), every(again, 5))  # a run is evaluated after its data was closed
    data.close()
    squares = table(images=[encode(noise(12, 12, 3)) for _ in range(6)])
    assert open_memory(squares, Data(workers=0), 16)[0].shape == (3, 12, 12)
    assert open_memory(squares, Data(workers=0, size=8), 16)[0].shape == (3, 8, 8)


def test_a_dataset_with_a_transform_of_its_own_is_read_item_by_item():
    rows = table().with_transform(lambda batch: {"image": [torch.zeros(3, 8, 8)], "label": batch["label"]})
    data, _ = open_memory(rows, Data())
    assert isinstance(data, DatasetImages)
    assert (data.shape, data.labels.tolist()) == ((3, 8, 8), [0, 1] * 3)


def test_a_latent_cache_is_of_its_images(tmp_path):
    """Rows have no file names: pixels identify them."""
    rows, other = (table(images=[encode(noise(8, 8, 3)) for _ in range(6)]) for _ in range(2))
    for place, images in (("a", rows), ("a", rows), ("b", other)):
        data, _ = open_memory(images, Data(workers=0))
        assert encode_images(data, Identity(), tmp_path / place) == 0
    fails(lambda: encode_images(data, Identity(), tmp_path / "a"), "other images")


def test_several_splits_are_refused():
    splits = datasets.DatasetDict(train=table(), test=table())
    fails(
        lambda: resolve("train", "digits", {"data": splits}), "holds the splits train, test: pass one of them"
    )


def test_rows_name_no_file_outside_the_folder(tmp_path, opened):
    """The bytes of an image are missing, and its path may be any file of this machine."""
    secret, place = tmp_path / "secret.png", tmp_path / "pets"
    place.mkdir()
    Image.fromarray(IMAGES[0]).save(secret)
    Image.fromarray(IMAGES[0]).save(place / "own.png")
    (place / "link.png").symlink_to(secret)
    features = datasets.Features({"image": datasets.Image(decode=False)})
    import pyarrow.parquet

    def write(path):
        rows = datasets.Dataset.from_dict(
            {"image": [encode(IMAGES[1]), {"bytes": None, "path": path}]}, features=features
        )
        pyarrow.parquet.write_table(rows.data.table, place / "a.parquet")

    for path in (str(secret), "../secret.png", "link.png", "a\0b"):
        write(path)
        error(place / "a.parquet", "a.parquet row 1 names the file .*, which is not below .*: store")
    write("own.png")
    data = opened(place / "a.parquet", size=16, workers=0)
    assert torch.equal(to_bytes(every(data))[1], expected()[0])
    rows = datasets.Dataset.from_dict({"image": [{"bytes": None, "path": str(secret)}]}, features=features)
    assert len(open_memory(rows, Data(size=8, workers=0))[0].labels) == 1  # the user's own
