"""The summary at the start of a run."""

import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from driftgen.data.images import open_images
from driftgen.support.distributed import Distributed
from driftgen.training.config import Encoder
from driftgen.training.pretrain import pretrain
from driftgen.training.recipes import load_recipe
from driftgen.training.summary import describe_training, resume_command
from tests.support.runs import SMALL, Silent, run


@pytest.fixture
def photos(tmp_path):
    """120 images of two classes, one of them unreadable."""
    random = np.random.default_rng(0)
    for name, count in (("cat", 80), ("dog (1)", 40)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(count):
            pixels = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i:03d}.png")
    (tmp_path / "photos" / "dog (1)" / "007.png").write_bytes(b"broken")
    return tmp_path / "photos"


def test_a_run_describes_itself(tmp_path, photos):
    changes = ["data.kind=images", f"data.path={photos}", "data.size=8", "data.channels=3"]
    changes += ["data.workers=0", "optim.steps=7"]
    _, view = run(tmp_path / "r", *changes, "batch.classes=2", "batch.micro=2")
    (summary,) = view.summaries
    rows = summary.rows
    assert rows["data"] == (
        f"119 color images of 8x8 pixels, 2 classes; smallest: dog (1) with 39; from {photos}"
    )
    assert rows["unreadable"] == f"1 left out: {photos}/dog (1)/007.png"
    assert rows["generator"].startswith("ImageMLP, ")
    assert rows["generator"].endswith(" parameters")
    assert rows["encoder"] == "none: the loss compares the samples themselves"
    assert rows["batch"] == (
        "2 classes of 8 generated, 8 positive and 4 unconditional samples, in 2 micro-batches"
    )
    assert rows["device"].startswith("cpu, 1 thread, ")
    assert rows["device"].endswith("float32")
    assert rows["steps"] == "7; checkpoint and model at the end, samples at the end"
    assert rows["output"].startswith(f"{tmp_path / 'r'}: ")
    assert "Ctrl-C" in rows["stop"]
    assert "compiling" not in rows
    assert summary.step == 0
    assert summary.first_step == "first step"
    assert view.steps == [1, 2, 3, 4, 5, 6, 7]
    (speed,) = view.speeds  # known after the first and five more
    assert speed.seconds_left == pytest.approx(speed.seconds_per_step)
    assert speed.memory_bytes > 50 * 2**20

    # Resumed: the steps that are left, at the speed so far.
    _, view = run(
        tmp_path / "r",
        *changes,
        "batch.classes=2",
        "batch.micro=2",
        "optim.steps=9",
        override=True,
    )
    (summary,) = view.summaries
    assert summary.step == 7
    assert summary.rows["steps"].startswith("9, 2 left: resumes after step 7; ")
    assert " left at " in summary.rows["time"]
    assert view.steps == [8, 9]
    # Complete: nothing to summarize.
    _, view = run(
        tmp_path / "r", *changes, "batch.classes=2", "batch.micro=2", "optim.steps=9", override=True
    )
    assert view.summaries == []
    assert view.steps == [9]


def test_an_encoder_is_named_once():
    class Pooled(nn.Module):
        pass

    entries = Encoder.model_construct(kind="pooled", path=None, options={}), Encoder(path="runs/mae")
    config = load_recipe("digits", (), "train").model_copy(update={"encoders": entries})
    rows = describe_training(config, open_images(config.data), nn.Identity(), [Pooled(), Pooled()])
    assert rows["encoder 1"] == "Pooled, 0 parameters"
    assert rows["encoder 2"] == "Pooled, 0 parameters, runs/mae"


def test_pretraining_describes_itself(tmp_path):
    changes = ["batch_size=8", "optim.steps=1", "mae.finetune_steps=0", "data.limit=40", "micro=2"]
    view = Silent()
    recipe = load_recipe("mae-digits", changes, "pretrain")
    pretrain(recipe, tmp_path / "r", Distributed.start("cpu"), view, name="mae-digits")
    rows = view.summaries[0].rows
    assert rows["data"] == "40 gray images of 8x8 pixels, 10 classes; smallest: 0 with 4"
    assert rows["encoder"].startswith("ResNetMAE, ")
    assert rows["batch"] == "8 images, in 2 micro-batches"


@pytest.mark.parametrize(
    ("words", "environment", "command"),
    [
        (
            ["/usr/bin/driftgen", "train", "folder", "--set", "data.path=my photos"],
            {},
            "driftgen train folder --set 'data.path=my photos'",
        ),
        (["/x/driftgen/__main__.py", "train", "digits"], {}, "python -m driftgen train digits"),
        (
            ["/x/driftgen/__main__.py", "train", "digits"],
            {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"},
            "torchrun --nproc-per-node 8 -m driftgen train digits",
        ),
        (
            ["/x/driftgen/__main__.py", "train", "digits"],
            {"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"},
            "torchrun --nnodes 2 --nproc-per-node 8 -m driftgen train digits",
        ),
        (["script.py"], {}, "driftgen.train('digits', 'runs/x', ...) with the same other arguments"),
    ],
)
def test_resume_command(monkeypatch, words, environment, command):
    monkeypatch.setattr(sys, "argv", words)
    for name in ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resume_command("train", "digits", Path("runs/x")) == command


@pytest.mark.slow
def test_the_command_shows_it_and_a_dry_run_leaves_nothing(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sets = [word for change in (*SMALL, "optim.steps=4") for word in ("--set", change)]
    words = ["train", "digits", *sets, "--device", "cpu", "--out", "r"]
    done = here(*words, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())
    assert [line.split()[0] for line in done.stdout.splitlines() if line[0] != " "] == [
        "time",
        "memory",
        "disk",
        "dry",
    ]
    assert "in all: " in done.stdout
    assert "1,437 gray images of 8x8 pixels, 10 classes" in done.stderr
    assert "resume" not in done.stderr
    done = here(*words)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert any(line.startswith("resume     driftgen train digits --set batch.classes=4") for line in lines)
    assert not any(line.endswith(" ") for line in lines)
    assert max(len(line) for line in lines if not line.startswith(("resume", "step", "warning"))) <= 80

    def state():
        return {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in tmp_path.rglob("*")}

    before = state()
    done = here(*words, "--set", "optim.steps=6", "--dry-run")
    assert done.returncode == 2
    assert "holds a run of another configuration (optim.steps: 4 -> 6)" in done.stderr
    done = here(*words, "--set", "optim.steps=6", "--override", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "for the 2 steps after step 4: " in done.stdout
    assert state() == before
