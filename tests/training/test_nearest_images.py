"""Nearest training images of a run on files, shards or a dataset: exact, and bounded in time and memory."""

import io
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.data.arrays import from_arrays
from driftgen.data.config import Augment, Data
from driftgen.data.images import open_images
from driftgen.data.in_memory import DatasetImages
from driftgen.report.run_page import write_report
from driftgen.support.distributed import Distributed
from driftgen.support.sheets import read_sheet
from driftgen.training import previews
from driftgen.training.build import Parts
from driftgen.training.previews import save_nearest
from driftgen.training.trainer import Training
from tests.support.image_data import write_tar
from tests.support.runs import config, run

COUNT = 150
IMAGES = np.random.default_rng(5).integers(0, 256, (COUNT, 8, 8), dtype=np.uint8)


def encode(pixels):
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, "PNG")
    return body.getvalue()


def write_folder(folder):
    for i, pixels in enumerate(IMAGES):
        path = folder / "ab"[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(pixels))
    return folder


class Items:
    """A dataset whose images change with every access, as those of a random transform do."""

    classes = ("a", "b")
    targets = tuple(i % 2 for i in range(COUNT))

    def __init__(self):
        self.read = 0

    def __len__(self):
        return COUNT

    def __getitem__(self, i):
        self.read += 1
        noise = 0 if self.read <= 2 * COUNT else torch.rand(()).item()
        return torch.from_numpy(IMAGES[i])[None] / 255 * (1 - noise), i % 2


def open_folder(folder, workers=0):
    augment = Augment(flip=True, crop="random-resized")
    return open_images(
        Data(path=str(write_folder(folder)), size=8, channels=1, workers=workers, augment=augment)
    )


def open_tar(folder):
    members = []
    for i, pixels in enumerate(IMAGES):
        members += [(f"{i:03}.png", encode(pixels)), (f"{i:03}.cls", str(i % 2).encode())]
    path = write_tar(folder / "photos.tar", members)
    return open_images(Data(path=str(path), size=8, channels=1, workers=0))


def open_dataset(folder):
    return DatasetImages(Items(), Data(kind="memory", channels=1))


def copies(chosen):
    """Return samples of two classes: the first of each row is the training image in ``chosen``."""
    samples = torch.zeros(20, 1, 8, 8)
    for row, i in enumerate(chosen):
        samples[10 * row] = torch.from_numpy(IMAGES[i]).float() / 127.5 - 1
    return samples


def brute_force(query, k=5):
    """Return indices and cosine similarities of the k nearest images."""
    rows = IMAGES.reshape(COUNT, -1).astype(np.float64)
    query = query.astype(np.float64).ravel()
    cosine = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
    order = np.argsort(-cosine)[:k]
    return order, cosine[order]


def check(sheet, names=("a", "b")):
    """Compare every row of a sheet with a full search."""
    for row in range(sheet.rows):
        sample, *found = (np.asarray(image) for image in sheet.images[6 * row : 6 * row + 6])
        indices, cosine = brute_force(sample)
        assert np.array_equal(np.stack(found), IMAGES[indices])
        captions = [f"{c:.3f} ({names[i % 2]})" for i, c in zip(indices, cosine, strict=True)]
        assert list(sheet.captions[6 * row + 1 : 6 * row + 6]) == captions


@pytest.mark.parametrize("source", [open_folder, open_tar, open_dataset])
def test_the_images_of_any_data_are_searched(source, tmp_path):
    data = source(tmp_path)
    before = torch.get_rng_state()
    save_nearest(copies((3, 4)), 2, data, tmp_path / "nearest.png")
    assert torch.equal(torch.get_rng_state(), before)
    sheet = read_sheet(tmp_path / "nearest.png")
    assert sheet.rows == 2
    assert sheet.captions[1].startswith("1.000 ")
    check(sheet, data.class_names)
    assert sheet.note == f"compared with all {COUNT} training images"


def test_images_are_shown_as_they_were_compared(tmp_path):
    data = open_dataset(tmp_path)
    data.dataset.read = 2 * COUNT  # from now on the images change
    save_nearest(copies((3, 4)), 2, data, tmp_path / "nearest.png")
    sheet = read_sheet(tmp_path / "nearest.png")
    assert data.dataset.read == 3 * COUNT  # each once
    for i in (1, 7):
        nearest, sample = np.asarray(sheet.images[i]), np.asarray(sheet.images[i - 1])
        scale = nearest.sum() / sample.sum()
        assert np.abs(nearest - sample * scale).max() < 2


def test_a_run_on_a_folder_reports_them(tmp_path):
    folder = write_folder(tmp_path / "photos")
    changes = (
        *(f"data.path={folder}", "data.kind=images", "data.size=8", "data.channels=1", "data.workers=2"),
        *("batch.classes=2", "optim.steps=2"),
    )
    done, _ = run(tmp_path / "run", *changes, report=write_report)
    assert done
    sheet = read_sheet(tmp_path / "run" / "samples" / "nearest.png")
    check(sheet)
    page = " ".join((tmp_path / "run" / "report.html").read_text().split())
    assert "Nearest training images" in page
    assert f"pixels (compared with all {COUNT} training images)." in page


@pytest.mark.parametrize("source", [open_folder, open_tar, open_dataset, None])
def test_a_search_is_bounded(source, tmp_path, monkeypatch):
    """A part of the data is compared, chosen from all of it."""
    array = from_arrays(IMAGES, np.arange(COUNT) % 2, Data(kind="memory", channels=1))
    data = source(tmp_path) if source else array
    monkeypatch.setattr(previews, "MOST_IMAGES", 40)
    monkeypatch.setattr(previews, "VALUES", 40 * 64)
    loaded = []
    load = data.load
    monkeypatch.setattr(data, "load", lambda indices, *args, **kw: loaded.append(indices) or load(indices, 0))
    save_nearest(copies((3, 4)), 2, data, tmp_path / "nearest.png")
    indices = torch.cat(loaded)
    assert len(indices) == len(indices.unique()) == 40
    assert 30 < indices.float().mean() < COUNT - 30
    note = f"compared with 40 of {COUNT} training images, chosen at random"
    assert read_sheet(tmp_path / "nearest.png").note == note


def test_a_slow_search_stops(tmp_path, monkeypatch):
    data = open_folder(tmp_path)
    monkeypatch.setattr(previews, "SECONDS", -1.0)
    save_nearest(copies((3, 4)), 2, data, tmp_path / "nearest.png")
    note = f"compared with 64 of {COUNT} training images, chosen at random"  # one batch
    assert read_sheet(tmp_path / "nearest.png").note == note


def test_large_images_are_compared_in_small_batches(tmp_path, monkeypatch):
    data = open_folder(tmp_path)
    monkeypatch.setattr(previews, "BATCH_VALUES", 10 * 64)
    sizes, load = [], data.load
    monkeypatch.setattr(data, "load", lambda part, *args, **kw: sizes.append(len(part)) or load(part, 0))
    save_nearest(copies((3, 4)), 2, data, tmp_path / "nearest.png")
    assert sizes == [10] * (COUNT // 10)


def test_random_crops_of_larger_images_are_compared_by_their_center(tmp_path):
    large = np.random.default_rng(0).integers(0, 256, (20, 12, 20), dtype=np.uint8)
    large[:, :, 4:16] = np.repeat(np.repeat(IMAGES[:20, :6, :6], 2, 1), 2, 2)
    section = Data(kind="memory", channels=1, size=6, augment=Augment(crop="random-resized"))
    samples = torch.from_numpy(IMAGES[:20, :6, :6])[:, None].float() / 127.5 - 1
    save_nearest(samples, 2, from_arrays(large, np.arange(20) % 2, section), tmp_path / "nearest.png")
    sheet = read_sheet(tmp_path / "nearest.png")
    assert all(float(sheet.captions[i][:5]) > 0.9 for i in (1, 7))


def test_damaged_images_do_not_end_a_run(tmp_path):
    data = open_folder(tmp_path)
    for i in range(10):
        path = tmp_path / "ab"[i % 2] / f"{i:03}.png"
        path.write_bytes(path.read_bytes()[:60])
    said = []
    assert save_nearest(copies((3, 4)), 2, data, tmp_path / "nearest.png", said.append) is None
    (line,) = said
    assert line.startswith("no nearest training images in the report: ")
    assert f"of {COUNT} images cannot be read, more than 1%" in line
    assert not (tmp_path / "nearest.png").exists()


def test_no_sheet_for_few_images_or_another_shape(tmp_path):
    few = from_arrays(IMAGES[:5], None, Data(kind="memory", channels=1))
    latents = from_arrays(IMAGES, None, Data(kind="memory", channels=1))
    assert save_nearest(torch.zeros(100, 1, 8, 8), 1, few, tmp_path / "nearest.png") is None
    assert save_nearest(torch.zeros(100, 3, 64, 64), 1, latents, tmp_path / "nearest.png") is None
    assert not list(tmp_path.iterdir())


class Crowded(Items):
    """Notices reads from two threads at once."""

    def __init__(self):
        super().__init__()
        self.inside, self.crowded = threading.Lock(), False

    def __getitem__(self, i):
        if not self.inside.acquire(blocking=False):
            self.crowded = True
            return super().__getitem__(i)
        try:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.02)  # longer than the preview takes
            return super().__getitem__(i)
        finally:
            self.inside.release()


@pytest.mark.parametrize("queue", ["index", "queue"])
def test_no_two_threads_read_the_data_at_once(queue, tmp_path):
    data = open_dataset(tmp_path)
    data.dataset, data.decodes = Crowded(), True  # loads ahead in a thread, as for images of files
    changes = ("data.kind=memory", f"queue.kind={queue}", "queue.push=16", "batch.classes=2")
    task = Training(config(*changes, "optim.steps=1"), Distributed.start("cpu"), parts=Parts(data))
    task.compute_gradient(0)  # the samples of the next step are read in the background
    task.save_preview(task.generator, tmp_path / "step-1")
    assert (tmp_path / "nearest.png").is_file()
    assert not data.dataset.crowded
