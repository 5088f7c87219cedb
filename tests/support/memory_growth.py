"""Resident memory over the steps of a run with reports, previews and checkpoints.

``python -m tests.support.memory_growth --seconds 60`` trains as long as that and prints the growth in bytes
per step.
"""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np

from driftgen.report.run_page import write_report
from driftgen.training.loop import Loop
from tests.support import runs
from tests.support.fault_search import Counts, Fault, main

BOUND = 4096  # bytes a step
WARM_UP = 300  # steps
LEAST = 900  # steps after the warm-up, to fit a line: a page more or less is no growth
CHANGES = [
    "encoders=[]", "output.metrics_every=1", "output.samples_every=10", "output.report_every=10",
    "output.checkpoint_every=50",
]  # fmt: skip


class Forgetful(runs.Silent):
    """A view that keeps nothing."""

    def update(self, row):
        pass

    advance = info = warn = measured = lambda self, *arguments: None


class EnoughError(BaseException):
    """The measurement is over."""


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(folder: Path, steps: int, tick: Callable[[dict[int, int]], None]) -> dict[int, int]:
    """Train and return the resident memory after each step. ``tick`` may end the run by EnoughError."""
    sizes: dict[int, int] = {}
    follow = Loop._follow_step

    def measured(self, *arguments):
        follow(self, *arguments)
        sizes[self.step] = resident()
        tick(sizes)

    with (
        mock.patch.object(Loop, "_follow_step", measured),
        mock.patch.object(runs, "Silent", Forgetful),
        contextlib.suppress(EnoughError),
    ):
        runs.run(folder, f"optim.steps={steps}", *CHANGES, report=write_report)
    return sizes


def growth(sizes: dict[int, int], warm_up: int = WARM_UP) -> float:
    """Return the slope of memory after the warm-up, in bytes per step."""
    steps = [step for step in sizes if step >= warm_up]
    return float(np.polyfit(steps, [sizes[step] for step in steps], 1)[0])


def search(seed: int, only: str, seconds: float) -> Iterator[Counts]:
    """Train until the time is over and yield the growth, if there are steps enough to tell."""
    end = time.monotonic() + seconds

    def tick(sizes):
        if time.monotonic() > end:
            raise EnoughError

    with tempfile.TemporaryDirectory() as folder:
        sizes = measure(Path(folder) / "run", 10**6, tick)
    counts = Counts(tried=len(sizes))
    if len(sizes) >= WARM_UP + LEAST:
        slope = counts.largest["bytes a step"] = growth(sizes)
        if slope >= BOUND:
            text = f"{slope:.0f} bytes a step over {len(sizes)} steps, bound {BOUND}"
            again = f"python -m tests.support.memory_growth --seconds {seconds:.0f}"
            counts.faults.append(Fault(text, again))
    yield counts


if __name__ == "__main__":
    main(search)
