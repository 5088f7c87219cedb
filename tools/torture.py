"""Try to break driftgen for half an hour, and count: ``make torture``.

python -m tools.torture [--out results/reliability] [--minutes 28] [--seed S] [--only PART ...] [--jobs 2]

Each part generates cases of one class of fault in a process of its own: killed runs, damaged files, odd
command lines, odd arguments of the API, growing memory, numbers at the edge. The parts share the time. The
figures go to ``reliability.json``, each fault with the command that shows it again to ``faults.jsonl``. The
exit code is 0 only without faults. Ctrl-C writes what there is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write
from driftgen.support.provenance import provenance
from tools.records import without_folders

__all__ = ["PARTS", "Part", "Progress", "main"]

ROOT = Path(__file__).parents[1]
GRACE = 150.0  # seconds that a part may take beyond its share, before it counts as a hang


@dataclass
class Progress:
    """Counts of a part so far.

    Attributes:
        tried: number of cases.
        kinds: number of cases, or of events in them, by kind.
        largest: largest value of each measured quantity.
        faults: wrong answers, each with ``text`` and ``command``.
        state: waiting, running, complete, or stopped.
        seconds: time it was given.
        started: clock at its start.
        tail: last lines that it printed, for one that fails.
    """

    tried: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)
    faults: list[dict[str, str]] = field(default_factory=list)
    state: str = "waiting"
    seconds: float = 0.0
    started: float | None = None
    took: float = 0.0
    tail: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "tried": self.tried,
            "kinds": dict(sorted(self.kinds.items())),
            "largest": self.largest,
            "faults": len(self.faults),
            "state": self.state,
            "seconds": round(self.took, 1),
        }


def read_counts(progress: Progress, line: str) -> None:
    """Add a line of a search: counts and faults as JSON, see tests/support/fault_search."""
    try:
        record = json.loads(line)
    except ValueError:
        return
    progress.tried += record["tried"]
    progress.kinds.update(record["kinds"])
    for name, value in record["largest"].items():
        progress.largest[name] = max(value, progress.largest.get(name, value))
    progress.faults += record["faults"]


@dataclass(frozen=True)
class Part:
    """A class of faults.

    Attributes:
        module: generates the cases: ``python -m MODULE --seconds N --seed S --json``.
        weight: share of the time.
        about: the cases, for the screen.
    """

    module: str
    weight: float
    about: str


# In this order two jobs end at the same time.
PARTS: dict[str, Part] = {
    "kills": Part("tests.support.killed_runs", 5, "runs killed and resumed"),
    "command lines": Part("tests.support.bad_command_lines", 5, "command lines with an odd value"),
    "files": Part("tests.support.damaged_files", 3, "files damaged or with an odd value"),
    "numbers": Part("tests.support.fuzz", 3, "fields and losses against float64"),
    "memory": Part("tests.support.memory_growth", 2, "steps of one run"),
    "arguments": Part("tests.support.odd_api_inputs", 2, "calls with an odd argument"),
}


class Runner:
    """Runs the parts in processes, ``jobs`` at a time, and keeps their counts."""

    def __init__(self, parts: dict[str, Part], minutes: float, seed: int, jobs: int) -> None:
        self.parts, self.seed = parts, seed
        self.jobs = max(1, min(jobs, len(parts)))
        # Also in parallel no part takes more than the whole time.
        unit = 60 * minutes * self.jobs / sum(part.weight for part in parts.values())
        self.progress = {
            name: Progress(seconds=min(60 * minutes, unit * part.weight)) for name, part in parts.items()
        }
        self.end = time.monotonic() + 60 * minutes
        self.stopped = False
        self._waiting = list(parts)
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[str]] = set()
        self._workers = [threading.Thread(target=self._work, daemon=True) for _ in range(self.jobs)]

    def command(self, name: str) -> list[str]:
        """Return the words of a part's command after ``python``."""
        part, seconds = self.parts[name], self.progress[name].seconds
        return ["-m", part.module, "--seconds", f"{seconds:.0f}", "--seed", str(self.seed), "--json"]

    def run(self, show: Callable[[], None]) -> None:
        """Run all parts. ``show`` is called several times a second."""
        for worker in self._workers:
            worker.start()
        while any(worker.is_alive() for worker in self._workers):
            show()
            time.sleep(0.2)
        show()

    def stop(self) -> None:
        """End the processes; their counts so far stay."""
        self.stopped = True
        for number, wait in ((signal.SIGINT, 5.0), (signal.SIGKILL, 5.0)):
            for process in list(self._processes):
                if process.poll() is None:
                    os.killpg(process.pid, number)
            end = time.monotonic() + wait
            while time.monotonic() < end and any(p.poll() is None for p in list(self._processes)):
                time.sleep(0.05)
        for worker in self._workers:
            worker.join(timeout=5)

    def _work(self) -> None:
        while not self.stopped:
            with self._lock:
                if not self._waiting:
                    return
                name = self._waiting.pop(0)
            self._run_part(name)

    def _run_part(self, name: str) -> None:
        progress = self.progress[name]
        progress.state, progress.started = "running", time.monotonic()
        # Parts before it may have taken more than their share.
        progress.seconds = max(1.0, min(progress.seconds, self.end - progress.started))
        words = self.command(name)
        again = shlex.join(["python", *words])
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,  # Ctrl-C reaches this process alone, which ends the others in order
        )
        self._processes.add(process)
        watch = threading.Timer(progress.seconds + GRACE, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            read_counts(progress, line)
            progress.tail = [*progress.tail[-9:], line.rstrip()]
        code = process.wait()
        late = not watch.is_alive()
        watch.cancel()
        self._processes.discard(process)
        progress.took = time.monotonic() - progress.started
        progress.state = "stopped" if self.stopped else "complete"
        if not self.stopped and (code not in (0, 1) or (code == 1 and not progress.faults)):
            what = f"no end {GRACE:.0f} s after its time" if late else f"exit code {code}"
            last = next((text for text in reversed(progress.tail) if not text.startswith("{")), "")
            progress.faults.append({"text": f"{name}: {what}: {last}", "command": again})


def table(runner: Runner) -> Table:
    """Return the state of all parts."""
    left = max(0.0, runner.end - time.monotonic())
    shown = Table(title=f"{left / 60:.0f}:{left % 60:02.0f} left, seed {runner.seed}", title_justify="left")
    for column in ("part", "tried", "faults", "state"):
        shown.add_column(column, justify="right" if column in ("tried", "faults") else "left")
    for name, progress in runner.progress.items():
        count = len(progress.faults)
        style = "bold red" if count else ""
        about = f"{name}: {runner.parts[name].about}"
        shown.add_row(about, f"{progress.tried:,}", str(count), progress.state, style=style)
    return shown


def check_parts(names: Iterable[str]) -> None:
    """Raise InputError if the module of a part is missing."""
    for name in names:
        path = ROOT / (PARTS[name].module.replace(".", "/") + ".py")
        if not path.is_file():
            raise InputError(f"part {name!r} needs {path.relative_to(ROOT)}, which is missing: see --only")


def write_results(out: Path, runner: Runner, command: str) -> None:
    """Write the figures and the faults."""
    out.mkdir(parents=True, exist_ok=True)
    faults = [
        {"part": name, **fault} for name, progress in runner.progress.items() for fault in progress.faults
    ]
    record = {
        **provenance(command),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "seed": runner.seed,
        "minutes": round(sum(p.took for p in runner.progress.values()) / 60 / runner.jobs, 1),
        "complete": not runner.stopped,
        "faults": len(faults),
        "parts": {name: progress.record() for name, progress in runner.progress.items()},
    }
    with atomic_write(out / "faults.jsonl") as scratch:
        lines = "".join(json.dumps(fault) + "\n" for fault in faults)
        scratch.write_text(without_folders(lines), encoding="utf-8")
    with atomic_write(out / "reliability.json") as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.torture", description="Try to break driftgen.")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "reliability")
    parser.add_argument("--minutes", type=float, default=28)
    parser.add_argument("--seed", type=int, default=None, help="a random one if left out; it is recorded")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=None, metavar="PART")
    parser.add_argument("--jobs", type=int, default=2, help="parts at a time; each uses one core")
    options = parser.parse_args(arguments)
    names = options.only or list(PARTS)
    try:
        check_parts(names)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    runner = Runner({name: PARTS[name] for name in names}, options.minutes, seed, options.jobs)
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(stderr=True)
    try:
        with Live(table(runner), console=console, refresh_per_second=2, transient=False) as live:
            runner.run(lambda: live.update(table(runner)))
    except KeyboardInterrupt:
        console.print("Ctrl-C: ending the parts")
        runner.stop()
    write_results(options.out, runner, shlex.join(["python", "-m", "tools.torture", *words]))
    return summarize(runner, options.out, console)


def summarize(runner: Runner, out: Path, console: Console) -> int:
    """Print the faults and where the figures are; return the exit code."""
    faults = [fault for progress in runner.progress.values() for fault in progress.faults]
    for fault in faults[:20]:
        console.print(f"{fault['text']}\n    {fault['command']}", markup=False, highlight=False)
    cases = sum(progress.tried for progress in runner.progress.values())
    found = f"{len(faults)} fault{'s' * (len(faults) > 1)}" if faults else "no fault"
    console.print(f"{cases:,} cases, {found}: see {out / 'reliability.json'} and faults.jsonl")
    if runner.stopped:
        console.print("stopped before the end: the figures are those of the cases so far")
        return 130
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
