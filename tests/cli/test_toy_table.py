"""``driftgen toy``: the table after the bar shows the same drift, and no unexplained negative distance."""

import copy
import re

import pytest

from driftgen.data.toy import get_toy
from driftgen.report.toy_files import metric_rows, study_table
from driftgen.training.toy_study import ToyConfig, evolve, show_energy_distance


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--points", pytest.param("--generator", marks=pytest.mark.slow)])
def test_the_bar_and_the_table_show_the_same_drift(kind, tmp_path, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    words = ["toy", "bimodal", kind, "--steps", "3", "--samples", "64", "--positives", "64"]
    done = here(*words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (*_, bar) = re.findall(r"drift ([0-9.e+-]+)", done.stderr)
    rows = dict(re.findall(r"^(.*?)  +(\S.*?) *$", done.stdout, re.MULTILINE))
    assert rows["mean squared drift, last step"] == bar
    assert max(map(len, done.stdout.splitlines()[:-4])) <= 80  # the last lines are paths of files


@pytest.mark.parametrize("generator", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_drift_of_the_first_and_the_last_step(generator):
    seen = []
    config = ToyConfig(generator=generator, steps=4, samples=32, positives=32)
    evolution = evolve(get_toy("bimodal"), config, lambda step, drift: seen.append(drift))
    metrics = evolution.metrics
    assert (metrics["drift_of_first_step"], metrics["drift_of_last_step"]) == (seen[0], seen[-1])
    rows = metric_rows(metrics)
    assert rows["mean squared drift, first step"] == f"{seen[0]:.3g}"
    # V depends on the number of points per sample: the drift by many points is another quantity.
    assert [name for name in rows if "drift" in name] == [
        "mean squared drift, first step",
        "mean squared drift, last step",
    ]
    assert "the drift grows with the number of points per sample" in metrics["evaluator"]


@pytest.fixture(scope="module")
def evolution():
    return evolve(get_toy("bimodal"), ToyConfig(steps=1, samples=16, positives=16))


def test_a_negative_energy_distance_is_explained(evolution):
    assert show_energy_distance(0.25) == "0.2500"
    assert show_energy_distance(0.0) == "0.0000"
    assert show_energy_distance(-0.0031) == "0.0000 (unbiased estimate -0.0031)"
    metrics = evolution.metrics | {"energy_distance": -0.0031}
    assert metric_rows(metrics)["energy distance to fresh data, end"] == "0.0000 (unbiased estimate -0.0031)"
    assert "below 0" in metrics["evaluator"]


def test_the_study_explains_negative_distances_only_if_there_are_any(evolution):
    evolution = copy.copy(evolution)
    evolution.metrics = evolution.metrics | {
        "energy_distance": 0.5,
        "energy_distance_of_data_to_itself": 0.0002,
    }
    note = "below 0 means that no difference is found"
    assert note not in study_table({"default": evolution})
    evolution.metrics["energy_distance"] = -0.0031
    table = study_table({"default": evolution})
    assert "| -0.0031 |" in table
    assert note in table
