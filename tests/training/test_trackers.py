import json
import sys

import pytest
from PIL import Image

import driftgen as dg
from driftgen.training.trackers import Trackers, scalars
from tests.support.runs import config, run


def test_numbers_of_a_row():
    row = {
        "step": 5,
        "loss": 1.5,
        "drift": [0.1, 0.2],
        "scale": {"global": 3},
        "warnings": ["x"],
        "none": None,
    }
    assert dict(scalars(row)) == {"step": 5, "loss": 1.5, "drift/0": 0.1, "drift/1": 0.2, "scale/global": 3}


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(dg.InputError, match=r"output.wandb is set, but its library is missing"):
        Trackers(config("output.wandb=digits"), tmp_path)


def test_nothing_asked_nothing_loaded(tmp_path):
    trackers = Trackers(config(), tmp_path)
    trackers.update({"step": 1})
    trackers.close()
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_numbers_and_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "optim.steps=10", "output.samples_every=5", "output.tensorboard=true")
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    rows = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()[1:]))
    assert [(e.step, e.value) for e in found.Scalars("drift/1")] == [
        (row["step"], pytest.approx(row["drift"][1])) for row in rows
    ]
    assert [e.step for e in found.Images("samples")] == [0, 5, 10]


class Board:
    """What of wandb is used, with what it was told."""

    def __init__(self):
        self.said, self.started = [], []

    def init(self, **options):
        self.started.append(options)
        return self

    def Image(self, path):  # noqa: N802
        return Image.open(path).size

    def log(self, values, step):
        self.said.append((step, values))

    def finish(self):
        self.said.append("finished")


def test_wandb_goes_on_with_the_same_run(tmp_path, monkeypatch):
    """Against a stand-in: the library wants an account, or a service of its own."""
    board = Board()
    monkeypatch.setitem(sys.modules, "wandb", board)
    for steps in (5, 10):
        run(tmp_path, f"optim.steps={steps}", "output.samples_every=10", "output.wandb=digits", override=True)
    first, second = board.started
    assert first["project"] == "digits"
    assert first["id"] == second["id"] != ""
    steps = [said if said == "finished" else said[0] for said in board.said]
    assert steps == [0, 5, 5, "finished", 10, 10, "finished"]
    assert board.said[0][1].keys() == {"samples"}  # of the initial weights
    assert {"loss", "drift/0"} <= board.said[1][1].keys()
    assert board.said[2][1].keys() == {"samples"}
