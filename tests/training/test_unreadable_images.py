"""Unreadable images are named in the metrics, the warnings and the report of a run."""

import json

import numpy as np
import pytest
from PIL import Image

from driftgen.support.distributed import Distributed
from driftgen.training.health import Health
from driftgen.training.pretrain import pretrain
from driftgen.training.unreadable_images import UnreadableImages
from tests.support.fork_server import run_ranks
from tests.support.fsdp_runs import config
from tests.support.runs import Silent, run

ALONE = Distributed.start("cpu")


@pytest.fixture
def photos(tmp_path):
    """200 gray images; the header of one is damaged, and the pixels of another."""
    folder = tmp_path / "photos"
    (folder / "dots").mkdir(parents=True)
    for i in range(200):
        Image.fromarray(np.full((8, 8), i, np.uint8)).save(folder / "dots" / f"{i:03}.png")
    (folder / "dots" / "007.png").write_bytes(b"nothing")
    path = folder / "dots" / "003.png"
    path.write_bytes(path.read_bytes()[:50])
    return folder


def changes(photos):
    return [
        f"data.path={photos}",
        *("data.kind=images", "data.size=8", "data.channels=1", "data.workers=0"),
        *("optim.steps=2", "output.metrics_every=1"),
    ]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][1:]


def test_a_training_run_names_them(photos, tmp_path):
    done, view = run(tmp_path / "run", *changes(photos), "batch.positives=200")  # all, in the first step
    assert done
    first, *others = rows_of(tmp_path / "run")
    header, pixels = first["unreadable"]["names"]
    assert first["unreadable"]["count"] == 2
    assert header.startswith(f"{photos}/dots/007.png (UnidentifiedImageError")
    assert pixels.startswith(f"{photos}/dots/003.png (")
    assert not any("unreadable" in row for row in others)  # nothing new
    (warning,) = (text for text in first["warnings"] if text.startswith("unreadable images: 2 left out"))
    assert warning in view.said


def test_a_pretraining_run_names_them(photos, tmp_path):
    section = config("pretrain", *changes(photos), "batch_size=4", "mae.finetune_steps=0")
    pretrain(section, tmp_path / "run", ALONE, Silent())
    found = rows_of(tmp_path / "run")[0]["unreadable"]
    assert found["names"][0].startswith(f"{photos}/dots/007.png (UnidentifiedImageError")
    assert found["count"] in (1, 2)  # the other one may not have been drawn yet


class Names:
    def __init__(self, names):
        self.unreadable = names


def test_rows_are_written_when_images_are_found():
    names = []
    found = UnreadableImages(Names(names), ALONE)
    assert found.update() == {}
    names += [f"{i}.png" for i in range(30)]
    record = found.update()["unreadable"]
    assert (record["count"], record["names"]) == (30, [f"{i}.png" for i in range(20)])
    assert found.update() == {}
    names.append("more.png")
    assert found.update()["unreadable"]["count"] == 31
    assert UnreadableImages(object(), ALONE).update() == {}


def test_warnings_follow_powers_of_two():
    health = Health()
    counts = {}
    for count in range(1, 17):
        row = {"step": count, "unreadable": {"count": count, "names": ["a.png (why)"]}}
        counts[count] = len(health.update(row))
    assert [count for count, new in counts.items() if new] == [1, 2, 4, 8, 16]


PROGRAM = """
import json, sys
from driftgen.support.distributed import Distributed
from driftgen.training.unreadable_images import UnreadableImages

class Data:
    unreadable = ["both.png"]

processes = Distributed.start("cpu")
data = Data()
found = UnreadableImages(data, processes)
assert found.update()["unreadable"] == {"count": 1, "names": ["both.png"]}
assert found.update() == {}
if processes.rank == 1:
    data.unreadable = ["both.png", "mine.png"]
assert found.update()["unreadable"] == {"count": 2, "names": ["both.png", "mine.png"]}
processes.close()
"""


@pytest.mark.distributed
def test_images_that_another_process_found():
    run_ranks(["-c", PROGRAM])
