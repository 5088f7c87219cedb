"""Search for faults by generated cases: counts, time and memory bounds of a case, and the command of a
search.

A module with a function ``search(seed, only, seconds)`` that yields counts of a few cases calls :func:`main`.
``python -m MODULE --seconds 60 --seed 0`` then tries as many cases as fit. ``make torture`` runs these
modules with ``--json``.
"""

import argparse
import json
import logging
import os
import resource
import shlex
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 10  # for one case
GIBIBYTES = 2  # of address space beyond that of the process


@dataclass(frozen=True)
class Fault:
    """A wrong answer, and the command that shows it again."""

    text: str
    command: str

    def __str__(self) -> str:
        return f"{self.text}\n    {self.command}"


@dataclass
class Counts:
    """Results of the cases tried.

    Attributes:
        tried: number of cases.
        kinds: number of cases, or of events in them, by kind.
        largest: largest value of each measured quantity.
        faults: wrong answers.
    """

    tried: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def __add__(self, other: "Counts") -> "Counts":
        largest = dict(self.largest)
        for name, value in other.largest.items():
            largest[name] = max(value, largest.get(name, value))
        return Counts(self.tried + other.tried, self.kinds + other.kinds, largest, self.faults + other.faults)

    def took(self, seconds: float) -> None:
        """Keep the time of the slowest case."""
        self.largest["seconds"] = max(seconds, self.largest.get("seconds", 0.0))

    def record(self) -> dict[str, Any]:
        """Return everything but the faults, for JSON."""
        return {"tried": self.tried, "kinds": dict(self.kinds), "largest": self.largest}

    def line(self) -> str:
        """Return the counts as one line."""
        parts = [f"{self.tried} tried", *(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))]
        parts += [f"largest {name} {value:.3g}" for name, value in self.largest.items()]
        return ", ".join([*parts, f"{len(self.faults)} faults"])


# Yields the counts of a few cases at a time, from a seed, a selection and the seconds there are.
Search = Callable[[int, str, float], Iterator[Counts]]


class HangError(BaseException):
    """A case that takes too long."""


@contextmanager
def bounds(seconds: float = SECONDS) -> Iterator[None]:
    """Limit time and memory of a block."""

    def hang(*_: Any) -> None:
        raise HangError(f"longer than {seconds} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    previous = signal.signal(signal.SIGALRM, hang)
    resource.setrlimit(resource.RLIMIT_AS, (size + GIBIBYTES * 2**30, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, previous)


@contextmanager
def listening() -> Iterator[list[str]]:
    """Collect what a block prints, also by libraries in C, by ``logging`` without a configuration, and as
    warnings: those of each place, not only the first.
    """
    said: list[str] = []
    handlers, logging.root.handlers = logging.root.handlers, []
    loggers = [
        logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)
    ]
    streams = {h: h.stream for logger in loggers for h in logger.handlers if type(h) is logging.StreamHandler}
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    try:
        with tempfile.TemporaryFile("w+", errors="replace") as file:
            for fd, _ in kept:
                os.dup2(file.fileno(), fd)
            for handler in streams:
                handler.stream = file
            with (
                warnings.catch_warnings(record=True) as warned,
                redirect_stdout(file),
                redirect_stderr(file),
            ):
                warnings.simplefilter("always")
                try:
                    yield said
                finally:
                    file.flush()
                    file.seek(0)
                    said += [*file.read().splitlines(), *(str(warning.message) for warning in warned)]
    finally:
        logging.root.handlers = handlers
        for handler, stream in streams.items():
            handler.stream = stream
        for fd, copy in kept:
            os.dup2(copy, fd)
            os.close(copy)


def reproduction(module: str, seed: int, only: str = "") -> str:
    """Return the command that tries one case again."""
    words = ["python", "-m", module, "--seed", str(seed), "--cases", "1"]
    return shlex.join([*words, *(["--only", only] if only else [])])


def chosen(names: Iterable[str], only: str) -> list[str]:
    """Return the names that ``only`` selects: the one it is, or those that contain it."""
    names = list(names)
    found = [only] if only in names else [name for name in names if only in name]
    if not found:
        sys.exit(f"--only {only} is in none of: {', '.join(names)}")
    return found


def run_search(
    search: Search,
    seconds: float,
    seed: int,
    only: str = "",
    cases: int | None = None,
    note: Callable[[Counts], None] = lambda counts: None,
) -> Counts:
    """Add up the counts of a search until the time is over, the cases are tried, or the search ends.

    ``note`` is called with the counts of each part. The search is closed, also by Ctrl-C, so that it can
    clean up.
    """
    end, total = time.monotonic() + seconds, Counts()
    found = search(seed, only, seconds)
    try:
        for counts in found:
            total += counts
            note(counts)
            if time.monotonic() > end or (cases is not None and total.tried >= cases):
                break
    finally:
        found.close()  # type: ignore[attr-defined]
    return total


def main(search: Search) -> None:
    """Run a search from the command line and print what it finds; exit code 1 if there are faults.

    With ``--json`` every part of the search is a line, with its counts and its faults.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=None, help="number of cases; as many as fit if left out")
    parser.add_argument("--only", default="", help="part of the name of the cases to try")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    def note(counts: Counts) -> None:
        if options.json:
            faults = [{"text": fault.text, "command": fault.command} for fault in counts.faults]
            print(json.dumps({**counts.record(), "faults": faults}), flush=True)
        else:
            for fault in counts.faults:
                print(fault, flush=True)

    try:
        total = run_search(search, options.seconds, options.seed, options.only, options.cases, note)
    except KeyboardInterrupt:
        sys.exit(130)
    if not options.json:
        print(total.line())
    sys.exit(1 if total.faults else 0)
