"""Pictures of good and bad runs: each bad one shows the warning that it is made for."""

import json

import pytest

from driftgen.support.troubleshooting import TOPIC, topics
from tools.health_runs import CASES, main
from tools.tables import ROOT

FOLDER = ROOT / "results" / "health"


def test_recorded_runs_show_their_problem_and_nothing_else_is_recorded():
    record = json.loads((FOLDER / "health.json").read_text())
    assert list(record["rows"]) == list(CASES)
    assert {"command", "torch", "hardware", "evaluator", "seed"} <= record.keys()
    assert (FOLDER / "config.yaml").is_file()
    for name, row in record["rows"].items():
        case = CASES[name]
        told = [TOPIC.search(warning["text"])[1] for warning in row["warnings"]]
        assert set(told) <= set(topics())
        assert (case.topic in told) if case.topic else not told, name
        assert row["last"]["step"] == row["changes"]["optim.steps"], name
        assert (FOLDER / f"{name}.png").is_file()


@pytest.mark.slow
def test_a_case_is_trained_drawn_and_recorded(tmp_path):
    main(["initial-weights", "--steps", "20", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "health.json").read_text())["rows"].values()
    assert row["topic"] == "initial-weights"
    assert row["last"]["step"] == 20
    assert any("initial-weights" in warning["text"] for warning in row["warnings"])
    assert (tmp_path / "initial-weights.png").stat().st_size > 5000
