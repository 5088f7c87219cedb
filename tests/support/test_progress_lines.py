"""Progress of long work in redirected output."""

import io

import pytest
from rich.console import Console

from driftgen.support import progress


def test_redirected_output_gets_lines(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=40)
    with progress.track("sampling [x]", 100, "drift", console) as on_step:
        for step in range(20, 51):
            now += 2.0
            on_step(step, 0.1234)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "sampling [x] 24/100, 0.5/s, 0:02:32 left, drift 0.123"
    assert lines[-1] == "sampling [x] 50/100, 0.5/s, 0:01:40 left, drift 0.123"
    assert [int(line.split()[2].split("/")[0]) for line in lines] == [24, 29, 34, 39, 44, 49, 50]


def test_the_last_line_has_no_time_left(monkeypatch):
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    console = Console(file=io.StringIO(), width=80)
    with progress.track("features", 321_000, "s", console) as on_step:
        on_step(0, 0.0)
        now = 1.0
        on_step(321_000, 1.0)
    assert console.file.getvalue() == "features 321000/321000, 321,000/s, 1 s\n"


def test_a_quiet_process_prints_nothing():
    console = Console(file=io.StringIO(), quiet=True)
    with progress.track("encoding", 10, "share done", console) as on_step:
        on_step(10, 1.0)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize(
    ("metric", "value", "shown"),
    [
        ("drift", 0.02061, "drift 0.0206"),
        ("s", 0.02061, "20.6 ms"),
        ("s", 2.061, "2.06 s"),
        ("ms per chunk", 3.721, "3.72 ms per chunk"),
        ("network calls per image", 1, "1 network call per image"),
        ("network calls per image", 10, "10 network calls per image"),
        ("share done", 0.5, "share done 0.5"),
    ],
)
def test_units_follow_their_values(metric, value, shown):
    assert progress.show_metric(metric, value) == shown
