"""Seconds per step: without the first one, and known after a few."""

import pytest

from driftgen.training import step_clock
from driftgen.training.step_clock import StepClock, show_duration, show_speed


def ticks(monkeypatch, durations):
    """Run steps of these durations; return the clock and the number of the step at which it was known."""
    now = 100.0
    monkeypatch.setattr(step_clock.time, "monotonic", lambda: now)
    clock, known = StepClock(), []
    clock.start()
    for i, seconds in enumerate(durations, 1):
        now += seconds
        if clock.tick():
            known.append(i)
    return clock, known


@pytest.mark.parametrize(
    ("durations", "known"),
    [
        ([30.0], []),
        ([30.0, 0.5, 0.5], []),
        ([30.0, *8 * [0.5]], [6]),
        ([30.0, 12.0, 12.0, 12.0], [2]),
        ([30.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [4]),
    ],
)
def test_known_once_after_some_steps_or_seconds(monkeypatch, durations, known):
    assert ticks(monkeypatch, durations)[1] == known


def test_the_first_step_counts_apart(monkeypatch):
    clock, _ = ticks(monkeypatch, [30.0, 1.0, 2.0, 3.0])
    assert clock.first_step_seconds == 30
    assert clock.seconds_per_step == 2
    assert ticks(monkeypatch, [30.0])[0].seconds_per_step is None


def test_shown():
    assert [show_duration(s) for s in (5, 65, 4805, 3600 * 74)] == ["0:05", "1:05", "1:20:05", "3 d 2 h"]
    assert [show_speed(s) for s in (42.5, 0.25, 0.032)] == ["42.5 s/step", "0.25 s/step", "31.2 steps/s"]
