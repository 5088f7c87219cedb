"""Folders of images: classes, unusual image modes, unreadable files, and the worker processes."""

import json
import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.cli.runs import encode
from driftgen.data import decode
from driftgen.data.decode_workers import DecodeWorkers
from driftgen.data.folder import list_images
from driftgen.data.images import open_images
from driftgen.errors import InputError
from driftgen.pipeline import DriftPipeline
from driftgen.report.sample_folder import write_samples
from driftgen.training.config import Augment, Data
from driftgen.training.recipes import load_recipe
from tests.support.fork_server import CAPTURE, start_code
from tests.support.helpers import fails
from tests.support.image_data import EVERYTHING, every, noise, opening, to_bytes

opened = pytest.fixture(opening)


@pytest.fixture
def folder(tmp_path):
    """Two classes of smooth images of many sizes, among files that are not images."""
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


def test_the_sheet_of_samples_is_no_sample(tmp_path):
    pipe = DriftPipeline.from_pretrained("digits")
    sheet = write_samples(pipe, tmp_path, [3, 5], guidance=1.0, seed=0, about={})
    assert sheet.parent == tmp_path
    assert len(list_images(tmp_path).labels) == 2
    (tmp_path / "samples.json").unlink()  # a folder of one's own may have any names
    assert len(list_images(tmp_path).labels) == 3


def test_adm_center_crop():
    """Pixels that encode their coordinates show which part is kept."""
    x, y = np.meshgrid(np.linspace(0, 255, 400), np.linspace(0, 255, 100))
    image = Image.fromarray(np.stack([x, y, 0 * x], -1).round().astype(np.uint8))
    got = np.asarray(decode.center_crop(image, 16)).astype(float)
    assert got.shape == (16, 16, 3)
    assert abs(got[..., 0].mean() - 127.5) < 2
    assert abs(got[0, 0, 0] - 255 * 156.25 / 400) < 4  # the central quarter
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
    image, color = ODD[name]
    options = {"lossless": True} if name.endswith("webp") else {}
    image.save(tmp_path / name, **options)
    got = to_bytes(every(opened(tmp_path, size=8, workers=0)))[0].float().mean((1, 2))
    assert (got - torch.tensor(color, dtype=torch.float32)).abs().max() <= 2
    gray = to_bytes(every(opened(tmp_path, size=8, workers=0, channels=1)))
    assert gray.shape == (1, 1, 8, 8)
    expected = float(np.dot(color, [0.299, 0.587, 0.114]))
    assert (gray.float() - expected).abs().max() <= 2


def test_transparent_color_of_a_palette_is_white(tmp_path, opened):
    _palette().save(tmp_path / "a.png", transparency=1)
    assert (every(opened(tmp_path, size=8, workers=0)) == 1).all()


def test_exif_orientation_is_applied(tmp_path, opened):
    pixels = np.zeros((40, 40, 3), np.uint8)
    pixels[:20] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # displayed rotated by 90 degrees clockwise
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    image = every(opened(tmp_path, size=8, workers=0))[0]
    assert (image[:, :, 5:] > 0.9).all()
    assert (image[:, :, :3] < -0.9).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_listed_and_replaced(folder, opened, workers):
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
    assert torch.equal(images[11], before[5])  # the last image of the class is replaced by its first
    assert torch.equal(every(data), images)
    assert len(data.unreadable) == 1
    other = folder / "dogs" / "00.png"
    other.write_bytes(other.read_bytes()[:200])
    with pytest.raises(InputError, match=r"2 of 12 images cannot be read, more than 1%.*06\.png"):
        every(data)


def test_the_next_image_of_the_class_is_the_replacement(folder, opened):
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
    fails(
        lambda: open_images(Data(path=str(tmp_path), size=4, workers=0)),
        r"3 of 200 images cannot be read.*000\.bmp.*050\.bmp.*100\.bmp",
    )


def test_wrong_folders_are_errors(folder):
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
    """Return the decoding processes of all parents that are running."""
    listed = subprocess.run(["ps", "-eww", "-o", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return {int(pid): int(parent) for pid, parent, args in rows if args.rstrip().endswith("data/decode.py")}


def gone(pids, seconds=5.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not set(pids) & set(children()):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("augment", [{}, EVERYTHING])
def test_worker_processes_match_a_single_process(folder, opened, augment):
    options = {"size": 16, "augment": Augment(**augment)}
    alone, helped = opened(folder, workers=0, **options), opened(folder, workers=2, **options)
    which = torch.arange(12).repeat(3)
    assert torch.equal(alone.load(which, 4), helped.load(which, 4))
    assert torch.equal(alone.load(which, 4, 30), helped.load(which, 4, 30))
    parts = torch.cat([helped.load(which[:5], 4), helped.load(which[5:], 4, 5)])
    torch.testing.assert_close(parts, alone.load(which, 4), rtol=0, atol=1e-6)
    if augment:
        assert not torch.equal(alone.load(which, 4), alone.load(which, 5))


def test_closing_stops_the_workers(folder, opened):
    data = opened(folder, size=8, workers=2)
    mine = [process.pid for process in data._workers._all]
    assert set(mine) <= set(children())
    data.close()
    data.close()
    assert gone(mine)


def test_workers_exit_when_their_parent_is_killed(folder):
    """A script without a ``__main__`` guard can use workers."""
    script = (
        "import sys, time, torch\n"
        "from driftgen.data.images import open_images\n"
        "from driftgen.training.config import Data\n"
        "data = open_images(Data(path=sys.argv[1], size=8, workers=2))\n"
        "data.load(torch.arange(12), 0)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    process = start_code(script, folder, stdout=CAPTURE)
    assert process.stdout.readline() == "ready\n"
    workers = [pid for pid, parent in children().items() if parent == process.pid]
    assert len(workers) == 2
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(workers)


def test_a_killed_worker_is_an_error_and_workers_ignore_signals_of_the_group(folder, opened):
    data = opened(folder, size=8, workers=1)
    before = every(data)
    pid = data._workers._all[0].pid
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert torch.equal(every(data), before)
    os.kill(pid, signal.SIGKILL)
    fails(lambda: every(data), r"worker process ended .*00\.png.*lower data\.workers")


def error(path, message, **options):
    fails(lambda: open_images(Data(path=str(path), size=8, workers=0, **options)), message)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_named_pipe_is_unreadable_and_does_not_block(folder, opened, workers):
    os.mkfifo(folder / "dogs" / "pipe.png")
    data = opened(folder, size=8, workers=workers)
    assert data.unreadable == [f"{folder}/dogs/pipe.png (OSError: not a regular file)"]
    assert len(every(data)) == 12


def test_the_training_split_is_opened(folder, opened, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "all" / split).mkdir(parents=True)
    folder.rename(tmp_path / "all" / "train" / "pets")
    (tmp_path / "all" / "train" / "pets" / "dogs").rename(tmp_path / "all" / "train" / "dogs")
    data = opened(tmp_path / "all", size=8, workers=0)
    assert data.class_names == ["dogs", "pets"]
    assert data.notes == [f"{tmp_path / 'all'}: split train; val left out"]
    (tmp_path / "all" / "train").rename(tmp_path / "all" / "test")
    error(tmp_path / "all", "holds the splits test, val and none for training")
    (tmp_path / "all" / "val").rmdir()
    assert opened(tmp_path / "all", size=8, workers=0).class_names == ["dogs", "pets"]


LISTED = {
    "metadata.csv": lambda rows: "file_name,label\n" + "".join(f"{n},{label}\n" for n, label in rows),
    "metadata.jsonl": lambda rows: "".join(
        json.dumps({"file_name": n, "label": label}) + "\n" for n, label in rows
    ),
}


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize(
    ("labels", "names", "classes"),
    [
        (["tabby", "poodle"], ["poodle", "tabby"], [1, 0, 1, 0, 1, 0, 1]),
        ([2, 10], ["2", "10"], [0, 1, 0, 1, 0, 1, 0]),
    ],
)
def test_labels_of_an_imagefolder(folder, opened, name, labels, names, classes):
    """Labels in ``metadata.csv``, in any order of rows."""
    rows = [(f"{i:02}.png", labels[i % 2]) for i in range(7)]
    (folder / "dogs" / name).write_text(LISTED[name](rows[::-1]))
    data = opened(folder / "dogs", size=8, workers=0)
    assert (data.class_names, data.labels.tolist()) == (names, classes)
    assert torch.equal(every(data), every(opened(folder, size=8, workers=0))[5:])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file_name,label\n00.png,a\n", r"metadata\.csv has no row for 01\.png"),
        ("file_name,label\n00.png,a\n00.png,b\n", r"row 2 names 00\.png a second time"),
        ("name,label\n00.png,a\n", "row 1 has no file_name"),
        ("file_name,label\n" + "".join(f"{i:02}.png,\n" for i in range(7)), r"label of 00\.png is ''"),
        (
            "file_name,label\nno.png,a\n" + "".join(f"{i:02}.png,a\n" for i in range(7)),
            r"names no\.png, which",
        ),
        ("file_name,label\n\xff", "cannot be read"),
    ],
)
def test_wrong_metadata_is_one_line(folder, text, message):
    (folder / "dogs" / "metadata.csv").write_text(text, encoding="latin-1")
    error(folder / "dogs", message)


def test_metadata_without_labels_and_label_files(folder, opened):
    (folder / "dogs" / "metadata.csv").write_text("file_name,text\n00.png,a dog\n")
    data = opened(folder / "dogs", size=8, workers=0)
    assert data.class_names == ["dogs"]
    assert "metadata.csv has no column label" in data.notes[0]
    assert opened(folder, size=8, workers=0).class_names == ["cats", "dogs"]
    (folder / "dogs" / "labels.csv").write_text("00.png,3\n")
    error(folder / "dogs", r"labels\.csv is not read: write labels as metadata\.csv")
    assert opened(folder / "dogs", size=8, workers=0, conditional=False).class_names == ["all"]
    (folder / "dogs" / "metadata.csv").rename(folder / "dogs" / "metadata.parquet")
    error(folder / "dogs", r"metadata\.parquet is not read: write it as metadata\.csv")


def test_worker_processes_are_bounded_and_started_last(folder, tmp_path, monkeypatch):
    fails(lambda: load_recipe("digits", ["data.workers=100000"]), "data.workers.*256")
    started = []
    monkeypatch.setattr(DecodeWorkers, "_start", lambda self: started.append(self))
    fails(lambda: encode(folder, tmp_path / "out", tokenizer=str(tmp_path / "missing"), size=8), "missing")
    fails(lambda: encode(tmp_path / "none", tmp_path / "out", tokenizer="missing", size=8), "no such file")
    assert not started
