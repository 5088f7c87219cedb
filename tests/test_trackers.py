import sys

import pytest

import driftgen as dg
from driftgen.training.trackers import Trackers, scalars
from tests.test_trainer import config


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
