"""Tar shards: samples and labels, patterns, and every kind of damage."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data import decode
from driftgen.data.images import open_images
from driftgen.data.latent_encoding import encode_images
from driftgen.data.latents import LatentCache
from driftgen.tokenizers import Identity
from driftgen.training.config import Augment, Data
from tests.support.helpers import fails
from tests.support.image_data import EVERYTHING, every, noise, opening, to_bytes, write_tar

opened = pytest.fixture(opening)
IMAGES = [noise(20 + i, 30, 3) for i in range(8)]


def encode(pixels, suffix="png"):
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, {"jpg": "JPEG"}.get(suffix, suffix.upper()))
    return body.getvalue()


def sample(i, label=None):
    label = i % 2 if label is None else label
    return [(f"{i:04}.png", encode(IMAGES[i])), (f"{i:04}.cls", str(label).encode())]


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    for shard in range(2):
        members = [member for i in range(4 * shard, 4 * shard + 4) for member in sample(i)]
        write_tar(
            folder / f"part-{shard:03}.tar", [*members, ("README", b"hello"), ("0000.txt", b"a caption")]
        )
    return folder


def error(path, message, **options):
    fails(lambda: open_images(Data(path=str(path), size=8, workers=0, **options)), message)


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_those_of_the_archive(shards, opened, workers):
    data = opened(shards, size=16, workers=workers)
    assert (data.class_names, data.labels.tolist(), data.shape) == (["0", "1"], [0, 1] * 4, (3, 16, 16))
    expected = [np.asarray(decode.center_crop(Image.fromarray(image), 16)) for image in IMAGES]
    expected = torch.from_numpy(np.stack(expected)).permute(0, 3, 1, 2)
    assert torch.equal(to_bytes(every(data)), expected)
    assert data.unreadable == []


def test_the_same_images_as_a_folder(shards, opened, tmp_path):
    """Cropped, flipped and limited like files."""
    for i, image in enumerate(IMAGES):
        place = tmp_path / "folder" / str(i % 2)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{i:04}.png")
    options = {"size": 16, "workers": 0, "augment": Augment(**EVERYTHING)}
    folder, tar = opened(tmp_path / "folder", **options), opened(shards, **options)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # a folder lists one class after the other
    assert torch.equal(folder.load(torch.arange(8), 3), tar.load(order, 3))
    assert opened(shards, limit=2, size=8, workers=0).labels.tolist() == [0, 1]
    assert opened(shards, conditional=False, size=8, workers=0).class_names == ["all"]


def test_patterns_and_single_files(shards, opened):
    for pattern in ("part-{000..001}.tar", "part-*.tar", "part-{000,001}.tar", "{part-000,part-001}.tar"):
        assert len(opened(shards / pattern, size=8, workers=0).labels) == 8
    assert len(opened(shards / "part-001.tar", size=8, workers=0).labels) == 4
    assert len(opened(shards / "part-00[1-9].tar", size=8, workers=0).labels) == 4
    error(shards / "part-{000..003}.tar", r"part-002\.tar is missing")
    error(shards / "none-*.tar", r"no file matches .*none-\*\.tar")
    error(shards / "part-{001..000}.tar", "must rise")
    (shards / "part-002.npz").write_bytes(b"")
    error(shards / "part-*", "a pattern must match .tar files or .parquet files only")


def test_splits(shards, opened):
    write_tar(shards / "train-0.tar", sample(0) + sample(1))
    write_tar(shards / "test-0.tar", sample(2) + sample(3))
    for shard in shards.glob("part-*"):
        shard.unlink()
    data = opened(shards, size=8, workers=0)
    assert [name.rsplit("/", 1)[1] for name in data.paths] == ["0000.png", "0001.png"]
    assert data.notes == [f"{shards}: split train; test left out"]
    (shards / "train-0.tar").rename(shards / "val-0.tar")
    error(shards, "holds the splits test, validation and none for training")


@pytest.mark.parametrize(
    ("labels", "names", "classes"),
    [
        ([{"label": 1}, {"class": 0}], ["0", "1"], [1, 0]),
        ([{"label": "dog"}, {"label": "cat", "width": 3}], ["cat", "dog"], [1, 0]),
        ([{"label": 10}, {"label": 9}], ["9", "10"], [1, 0]),
    ],
)
def test_labels_in_json(tmp_path, opened, labels, names, classes):
    members = []
    for i, label in enumerate(labels):
        members += [(f"a/{i}.jpg", encode(IMAGES[i], "jpg")), (f"a/{i}.json", json.dumps(label).encode())]
    data = opened(write_tar(tmp_path / "a.tar", members), size=8, workers=0)
    assert (data.class_names, data.labels.tolist()) == (names, classes)
    assert len(data.notes) == (names == ["9", "10"])


def test_without_labels_there_is_one_class(tmp_path, opened):
    path = write_tar(tmp_path / "a.tar", [(f"{i}.webp", encode(IMAGES[i], "webp")) for i in range(3)])
    data = opened(path, size=8, workers=0)
    assert data.class_names == ["all"]
    assert "no labels" in data.notes[0]


def test_a_name_ends_at_its_first_dot(tmp_path, opened):
    """``x.seg.png`` is not the image of the sample x."""
    members = [*sample(0), ("0000.seg.png", b"a mask"), (".hidden.png", b"none")]
    assert len(opened(write_tar(tmp_path / "a.tar", members), size=8, workers=0).labels) == 1


def link(name, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, "/etc/passwd"
    return info


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("0.png", b""), ("0.cls", b"cat")], r"a\.tar: 0\.cls holds 'cat', expected a class number"),
        ([("0.png", b""), ("0.cls", b"-1")], r"0\.cls holds '-1'"),
        ([("0.png", b""), ("0.cls", b"1.5")], r"0\.cls holds '1\.5'"),
        ([("0.png", b""), ("0.cls", b"9" * 5000)], r"0\.cls holds '9999"),
        ([("0.png", b""), ("0.json", b"{")], r"a\.tar: 0\.json is not valid JSON"),
        ([("0.png", b""), ("0.json", b"[" * 100_000)], r"0\.json is not valid JSON"),
        ([("0.png", b""), ("0.json", b"[1]")], r"0\.json holds no JSON object"),
        ([("0.png", b""), ("0.json", b'{"label": 0.5}')], r"label in 0\.json is '0\.5'"),
        ([("0.png", b""), ("0.json", b'{"label": true}')], r"label in 0\.json is 'True'"),
        ([("0.png", b""), ("0.cls", b"0"), ("1.png", b"")], r"a\.tar/1\.png has no label"),
        ([("0.png", b""), ("0.cls", b"0"), ("1.png", b""), ("1.json", b"{}")], r"1\.png has no label"),
        ([("0.png", b""), ("0.cls", b"0"), ("1.png", b""), ("1.json", b'{"label": "a"}')], "a number as its"),
        ([("0.png", b""), ("0.png", b"")], r"a\.tar: 0\.png occurs twice"),
        ([("0.png", b""), ("0.jpg", b"")], r"sample 0 has the images \.png and \.jpg"),
        ([("0.png", b""), ("0.cls", b"0"), ("1.cls", b"0")], r"1\.cls has no image beside it"),
        ([("cats/0.png", b""), ("dogs/1.png", b"")], "images in folders and no labels"),
        ([link("0.png")], r"0\.png is not a regular file"),
        ([link("0.png", tarfile.FIFOTYPE)], r"0\.png is not a regular file"),
        ([("0.txt", b"")], "no image in 1 tar files"),
        ([], "no image in 1 tar files"),
    ],
)
def test_wrong_samples_are_one_line(tmp_path, members, message):
    error(write_tar(tmp_path / "a.tar", members), message)


def test_damaged_archives_are_one_line(shards):
    path = shards / "part-001.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        members = tar.getmembers()
    path.write_bytes(whole[: members[4].offset_data + 100])  # ends within an image
    error(shards, r"part-001\.tar cannot be read as a tar file \(unexpected end of data\)")
    damaged = bytearray(whole)
    damaged[members[4].offset : members[4].offset + 512] = b"\xff" * 512
    path.write_bytes(damaged)
    error(shards, rf"part-001\.tar is damaged at byte {members[4].offset:,}, after 2 samples")
    path.write_bytes(b"")
    error(shards, r"part-001\.tar cannot be read as a tar file \(empty file\)")
    path.write_bytes(b"no archive" * 200)
    error(shards, r"part-001\.tar cannot be read as a tar file")
    path.write_bytes(b"\x1f\x8b\x08")
    error(shards, r"part-001\.tar is compressed with gzip")


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_named_and_replaced(tmp_path, opened, workers):
    good, broken = encode(IMAGES[1]), encode(IMAGES[0])[:400]
    members = [("a.png", b"nothing"), ("b.png", good), ("c.png", broken), ("d.png", good)]
    members += [(f"{i:03}.png", good) for i in range(200)]
    data = opened(write_tar(tmp_path / "a.tar", members), size=8, workers=workers)
    reason = "UnidentifiedImageError: not a BMP, GIF, JPEG, PNG, PPM, TIFF or WEBP image: convert it"
    assert data.unreadable == [f"{tmp_path}/a.tar/a.png ({reason})"]
    images = every(data)
    assert len(images) == 203
    assert (images == images[0]).all()  # c is replaced by d
    assert len(data.unreadable) == 2
    assert data.unreadable[1].startswith(f"{tmp_path}/a.tar/c.png (")


def test_the_header_of_a_large_image_is_checked_from_its_beginning(tmp_path, opened):
    large = noise(200, 200, 3)
    formats = {"png": {}, "webp": {"lossless": True}, "tiff": {}, "jpg": {"quality": 100}}
    members = []
    for suffix, options in formats.items():
        body = io.BytesIO()
        Image.fromarray(large).save(body, {"jpg": "JPEG"}.get(suffix, suffix.upper()), **options)
        assert len(body.getvalue()) > decode.HEADER
        members.append((f"{suffix}.{suffix}", body.getvalue()))
    data = opened(write_tar(tmp_path / "a.tar", members), size=8, workers=0)
    assert len(every(data)) == 4
    assert data.unreadable == []


def test_images_beside_shards_are_refused(shards):
    (shards / "cats").mkdir()
    Image.new("RGB", (4, 4)).save(shards / "cats" / "a.png")
    error(shards, r"holds part-000\.tar and cats/a\.png: move the images")


def test_a_latent_cache_of_shards(shards, opened, tmp_path):
    """The shards may be moved, but not exchanged."""
    data = opened(shards, size=8, workers=0)
    assert encode_images(data, Identity(), tmp_path / "cache") == 0
    assert torch.equal(LatentCache(tmp_path / "cache").labels, data.labels)
    moved = shards.rename(tmp_path / "moved")
    assert encode_images(opened(moved, size=8, workers=0), Identity(), tmp_path / "cache") == 0
    write_tar(moved / "part-000.tar", [member for i in (0, 1, 2) for member in sample(i)] + sample(4, 1))
    other = opened(moved, size=8, workers=0)
    fails(lambda: encode_images(other, Identity(), tmp_path / "cache"), "other images")
