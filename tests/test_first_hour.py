"""The first hour of a new user in real processes: train, Ctrl-C, resume, sample, report."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
CLASSES = ("apple", "sky")
# The command as it is installed, with sizes that take seconds. Everything else is what a user runs.
PROGRAM = """
import sys
from pathlib import Path
from driftgen.training import recipe_sizes
recipe_sizes.FILE = Path(__file__).with_name("sizes.yaml")
from driftgen.cli import main
main()
"""
SIZES = """
tiny:
  expect: colored noise, after seconds
  folder:
    data.size: 8
    generator: {kind: decoder, options: {widths: [16, 8]}}
    encoders: [{kind: auto, switches: {vectors: false}}]
    batch: {classes: 2, generated: 8, positives: 8, unconditional: 2}
    optim: {lr: 2e-3, warmup: 10, steps: 150}
    ema: [0.9]
    output: {metrics_every: 5, samples_every: 50, checkpoint_every: 1000, report_every: 150}
  mae-folder:
    data.size: 8
    mae: {options: {base_channels: 40, blocks: [1], patchify: 2}, finetune_steps: 10, finetune_ramp: 5}
    batch_size: 8
    optim: {lr: 2e-3, warmup: 5, steps: 100}
    ema: [0.9]
    output: {metrics_every: 5, samples_every: 50, checkpoint_every: 1000, report_every: 100}
few_images:
  below: 1000
  folder: {data.augment.flip: true, data.augment.shift: 1.0}
"""
STEPS = {"runs/mae-photos": 100, "runs/photos": 150}


@pytest.fixture
def home(tmp_path):
    """Make a folder of 24 photos, one of them damaged, and a program ``driftgen``."""
    random = np.random.default_rng(0)
    for name, color in zip(CLASSES, ((200, 40, 30), (90, 150, 240)), strict=True):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for i in range(12):
            pixels = np.array(color) + random.normal(0, 20, (24, 32, 3))
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i:02}.jpg")
    (tmp_path / "photos" / "sky" / "07.jpg").write_bytes(b"no photo")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "driftgen").write_text(PROGRAM)
    (tmp_path / "bin" / "sizes.yaml").write_text(SIZES)
    return tmp_path


class Terminal:
    """Runs commands in a folder; their output goes to a file."""

    def __init__(self, home):
        self.home, self.log = home, home / "log.txt"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}

    def start(self, *words, stdin=subprocess.DEVNULL):
        with self.log.open("w") as log:
            return subprocess.Popen(
                [sys.executable, "bin/driftgen", *words],
                cwd=self.home,
                env=self.environment,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, *words, code=0):
        assert self.start(*words).wait(timeout=300) == code, self.text
        return self.text

    def interrupt(self, run, *words):
        """Start a command and press Ctrl-C once a run has written figures."""
        process = self.start(*words)
        metrics, deadline = self.home / run / "metrics.jsonl", time.monotonic() + 300
        while len(self.rows(metrics)) < 2:
            assert process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130, self.text
        return self.text

    def rows(self, path):
        return [json.loads(line) for line in path.read_text().splitlines()[1:]] if path.is_file() else []

    @property
    def text(self):
        return self.log.read_text()


@pytest.mark.slow
def test_the_first_hour(home):
    terminal = Terminal(home)
    command = ("train", "photos/", "--yes", "--device", "cpu")
    shown = f"driftgen {' '.join(command)}"

    # Ctrl-C during the pretraining, then during the training of the generator: the same command resumes.
    text = terminal.interrupt("runs/mae-photos", *command)
    assert "23 color images of 8x8 pixels, 2 classes" in " ".join(text.split())
    assert "1 left out: photos/sky/07.jpg" in text
    assert f"run the same command to resume: {shown}\n" in text
    assert not (home / "runs/photos").exists()
    text = terminal.interrupt("runs/photos", *command)
    assert "resumed after step" in text
    reason = "encoder runs/mae-photos: pretrained for this run, because there was no encoder for photos"
    assert reason in " ".join(text.split())
    stopped = terminal.rows(home / "runs/photos/metrics.jsonl")[-1]["step"]
    assert 0 < stopped < STEPS["runs/photos"]

    # An interrupted run has a model.
    assert "runs/early" in terminal.run("sample", "runs/photos", "-n", "2", "--out", "runs/early")
    text = terminal.run(*command)
    assert "resumed after step" in text
    assert text.splitlines()[-1] == "runs/photos/report.html"
    for run, steps in STEPS.items():
        rows = terminal.rows(home / run / "metrics.jsonl")
        assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
        assert rows[-1]["step"] == steps
    assert "Traceback" not in text

    terminal.run("sample", "runs/photos", "--labels", "sky,apple", "-n", "6", "--out", "runs/samples")
    names = sorted(path.name for path in (home / "runs/samples").glob("*.png"))
    assert len(names) == 7  # and grid.png
    assert sum("sky" in name for name in names) == 3
    (home / "runs/photos/report.html").unlink()
    terminal.run("report", "runs/photos")
    page = (home / "runs/photos/report.html").read_text()
    assert all(name in page for name in (*CLASSES, "photos/sky/07.jpg", shown))
    # The same command once more has nothing to do, and says so.
    assert "the run is complete" in terminal.run(*command)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "code", "words"),
    [
        ("n\n", 2, "not started: train the encoder with driftgen pretrain"),
        (None, 130, "driftgen: interrupted"),
    ],
)
def test_the_question_in_a_terminal(home, answer, code, words):
    terminal, (keyboard, stdin) = Terminal(home), pty.openpty()
    process = terminal.start("train", "photos/", "--device", "cpu", stdin=stdin)
    while "Pretrain an encoder for photos first, in runs/mae-photos? [Y/n]: " not in terminal.text:
        assert process.poll() is None, terminal.text
        time.sleep(0.02)
    if answer is None:
        process.send_signal(signal.SIGINT)
    else:
        os.write(keyboard, answer.encode())
    assert process.wait(timeout=300) == code, terminal.text
    os.close(keyboard)
    os.close(stdin)
    assert words in terminal.text
    assert "Traceback" not in terminal.text
    assert not (home / "runs").exists()
