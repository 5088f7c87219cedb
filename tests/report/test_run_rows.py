"""Rows of long runs in a bounded amount of memory."""

import json
import math
import sys
import tracemalloc

import numpy as np
import pytest

from driftgen.report.run_page import write_report
from driftgen.report.run_rows import read_rows
from driftgen.training.metrics_file import read_metrics
from tests.support.memory_growth import BOUND, growth, measure


def write(path, rows):
    lines = [{"header": {"task": "train", "temperatures": [0.02]}}, *rows]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(count):
    rng = np.random.default_rng(0)
    for step in range(1, count + 1):
        loss, drift = float(rng.normal()), rng.random(3).tolist()
        yield {"step": step, "loss": loss, "drift": drift, "drift_groups": {"a": drift}, "text": "x"}


def test_few_rows_are_those_of_the_file(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [*rows(100), {"step": 50, "loss": 7.0}])
    assert (*read_metrics(path), 0) == read_rows(path, most=50)


@pytest.mark.parametrize("count", [101, 999, 5000])
def test_neighbors_are_averaged_and_the_last_row_stays(tmp_path, count):
    every = list(rows(count))
    thinned = read_rows(write(tmp_path / "metrics.jsonl", every), most=50).rows
    assert len(thinned) <= 100
    assert thinned[-1] == every[-1]
    assert len(thinned) >= 25
    steps = [row["step"] for row in thinned]
    assert steps == sorted(steps)
    # Rows of equal weight: their mean is that of the file, but for the few that the last group lacks.
    for value in (lambda r: r["loss"], lambda r: r["drift"][2], lambda r: r["drift_groups"]["a"][0]):
        expected = np.mean([value(r) for r in every])
        assert np.mean([value(r) for r in thinned]) == pytest.approx(expected, abs=0.15)
    widths = np.diff(steps[:-2])
    assert max(widths) <= 2 * max(min(widths), 1)


def test_rows_that_a_page_names_stay_as_they_are(tmp_path):
    every = list(rows(3000))
    for row in every:
        row["warnings"] = ["collapsed: a; b"] if row["step"] >= 700 else []
    every[1233]["evaluation"] = {"metric": "FID", "samples": 9, "ema": {"0.9": {"FID": 3.0}}}
    every[50]["unreadable"] = {"count": 1, "names": ["a.png"]}
    every[2000]["unreadable"] = {"count": 2, "names": ["a.png", "b.png"]}
    thinned = {r["step"]: r for r in read_rows(write(tmp_path / "metrics.jsonl", every), most=50).rows}
    for step in (700, 1234, 2001, 3000):
        assert thinned[step] == every[step - 1]
    assert len(thinned) <= 104


def test_values_that_are_no_numbers_do_not_spread(tmp_path):
    every = [
        {"step": s, "loss": [math.nan, 2.0, None, 4.0][s % 4], "drift": [1.0] * (1 + s % 2)}
        for s in range(200)
    ]
    for row in read_rows(write(tmp_path / "metrics.jsonl", every), most=10).rows[:-1]:
        assert 2.0 < row["loss"] < 4.0
        assert row["drift"] in ([1.0], [1.0, 1.0])


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 2, "lo',
        "[1]",
        '{"step": "2"}',
        '{"step": true}',
        '{"step": -1}',
        '{"step": 2, "loss": "0.5"}',
        '{"step": 2, "loss": true}',
        '{"step": 2, "drift": 1.0}',
        '{"step": 2, "evaluation": []}',
        '{"step": 2, "spread": 1' + 400 * "0" + "}",
        "[" * 100_000,
    ],
)
def test_lines_of_another_type_are_counted(tmp_path, line):
    path = write(tmp_path / "metrics.jsonl", [{"step": 1}])
    with path.open("a") as file:
        file.write(f'{line}\n\n{{"step": 3, "loss": null}}\n')
    found = read_rows(path)
    assert (found.header["task"], [row["step"] for row in found.rows], found.skipped) == ("train", [1, 3], 1)


def test_a_report_takes_no_more_memory_for_more_rows(tmp_path):
    peaks = []
    for count in (1000, 4000):
        folder = tmp_path / str(count)
        folder.mkdir()
        write(folder / "metrics.jsonl", rows(count))
        write_report(folder)  # fills caches
        tracemalloc.start()
        write_report(folder)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_growth_is_the_slope_after_the_warm_up():
    sizes = {step: 10**6 + 100 * min(step, 50) + 7 * step for step in range(1, 200)}
    assert growth(sizes, 60) == pytest.approx(7)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_steps(tmp_path):
    """With reports, pictures and checkpoints."""
    slope = growth(measure(tmp_path / "run", 1200, lambda sizes: None))
    assert slope < BOUND, f"{slope:.0f} bytes a step"
