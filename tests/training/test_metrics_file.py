"""Metrics of a run that was cut in the middle of a line."""

import json
import os

import pytest

from driftgen.errors import InputError
from driftgen.training.metrics_file import read_metrics, repair_metrics
from driftgen.training.run_folder import METRICS, append_row
from tests.support.runs import run

ROWS = [{"header": {"task": "train"}}, {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize("size", range(len(TEXT) + 1))
def test_a_row_after_a_cut_is_not_lost(tmp_path, size):
    path = tmp_path / METRICS
    path.write_text(TEXT[:size])
    complete = [i for i in range(len(ROWS)) if size >= len("".join(TEXT.splitlines(True)[: i + 1])) - 1]
    assert repair_metrics(path) == bool(complete)
    append_row(tmp_path, {"step": 3})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [ROWS[i] for i in complete] + [{"step": 3}]


def test_a_run_resumes_after_a_cut_line(tmp_path):
    run(tmp_path, "encoders=[]", "optim.steps=2", "output.metrics_every=1")
    path = tmp_path / METRICS
    whole = path.read_text()
    path.write_text(whole[:-20])
    run(tmp_path, "encoders=[]", "optim.steps=4", "output.metrics_every=1", override=True)
    for line in path.read_text().splitlines():
        json.loads(line)
    header, rows = read_metrics(path)
    assert header["task"] == "train"
    assert [row["step"] for row in rows] == [1, 3, 4]


@pytest.mark.parametrize("lost", ["missing", "empty", "cut"])
def test_a_lost_header_is_written_again(tmp_path, lost):
    run(tmp_path, "encoders=[]", "optim.steps=1", "output.metrics_every=1")
    path = tmp_path / METRICS
    path.unlink()
    if lost != "missing":
        path.write_text("" if lost == "empty" else '{"header": {"ta')
    run(tmp_path, "encoders=[]", "optim.steps=2", "output.metrics_every=1", override=True)
    header, rows = read_metrics(path)
    assert header["task"] == "train"
    assert [row["step"] for row in rows] == [2]


@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link(tmp_path, exists):
    target = tmp_path / "outside"
    if exists:
        target.write_text("of somebody else")
    (tmp_path / METRICS).symlink_to(target)
    assert not repair_metrics(tmp_path / METRICS)
    with pytest.raises(InputError, match="is a link"):
        append_row(tmp_path, {"step": 1})
    assert os.path.exists(target) == exists
