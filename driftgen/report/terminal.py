"""Live view of a run in the terminal: progress, health metrics and warnings."""

from __future__ import annotations

import math
import re
import textwrap
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from driftgen.report.run_rows import read_rows
from driftgen.support.peak_memory import show_memory
from driftgen.support.progress import RightMargin
from driftgen.training.step_clock import Speed, show_duration, show_speed
from driftgen.training.summary import Summary

__all__ = ["LiveView", "facts_text", "sparkline", "wrap_line"]

BARS = "▁▂▃▄▅▆▇█"
TREND = 20  # width of a sparkline
MAX_POINTS = 400  # per curve; when reached, every second point is dropped and the sampling interval doubles
SHOWN_WARNINGS = 4
CHUNKS = ("energy_score", "chunk_error", "chunk_spread")  # of a policy
COMMAND = re.compile(r"(?<=: )(?:driftgen|python -m driftgen|torchrun) \S.*$")


class LiveView:
    """Shows a run during a ``with`` block: its summary, a progress bar that moves with every step, and the
    rows of ``metrics.jsonl``. Without a terminal it prints plain lines.

    Example::

        with LiveView("runs/digits", total=3000, temperatures=(0.02, 0.05, 0.2)) as view:
            view.update(row)
            view.warn("collapsed: ...")

    Args:
        title: name of the run.
        total: steps of the run.
        temperatures: τ of each raw drift in a row.
        every: without a terminal, print one line per this many rows.
        console: where to print; standard error by default.
        heartbeat: without a terminal, print a line at least every so many seconds, also within a step.
    """

    def __init__(
        self,
        title: str,
        total: int,
        temperatures: Sequence[float] = (),
        *,
        every: int = 10,
        console: Console | None = None,
        heartbeat: float = 10.0,
    ) -> None:
        self.title, self.total, self.temperatures, self.every = title, total, tuple(temperatures), every
        self.console = console or Console(stderr=True, highlight=False)
        self.warnings: deque[str] = deque(maxlen=SHOWN_WARNINGS)
        self._row: Mapping[str, Any] = {}
        self._printed_row: Mapping[str, Any] = self._row  # the latest one that has a line
        self._evaluation: Mapping[str, Any] | None = None  # the latest one
        self._seen, self._stride = 0, 1
        self._first: tuple[float, float] | None = None  # step and seconds of the first row
        self._history: dict[str, list[float]] = {}
        self._live: Live | None = None
        self._step: int | None = None  # None before the run begins
        self._seconds_per_step: float | None = None
        self._samples_per_step: int | None = None
        self._phase: str | None = None  # work that has no step yet, such as compiling
        self._phase_began = self._printed = time.monotonic()
        self._heartbeat, self._left, self._lock = heartbeat, threading.Event(), threading.Lock()

    def __enter__(self) -> LiveView:
        self._set_phase("preparing")
        if self.console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
            self._live.start()
        elif not self.console.quiet:
            threading.Thread(target=self._beat, name="driftgen-heartbeat", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._phase = None
        if self._live is not None:
            self._live.refresh()
            self._live.stop()
            self._live = None
        else:
            self._print_row()

    def begin(self, summary: Summary) -> None:
        """Print the summary of a run; its first step begins."""
        self._step, self._samples_per_step = summary.step, summary.samples_per_step
        self._set_phase(summary.first_step)
        rows = {**summary.rows, **({"resume": summary.resume} if summary.resume else {})}
        self.console.print(facts_text(rows, self.console.width, whole=("resume",)), soft_wrap=True)

    def advance(self, step: int, seconds_per_step: float | None) -> None:
        """Move the progress bar."""
        self._step, self._seconds_per_step, self._phase = step, seconds_per_step, None

    def measured(self, speed: Speed) -> None:
        """Print the speed, once it is known."""
        peak = speed.memory_bytes
        memory = "" if peak is None else f", peak memory {show_memory(peak)}"
        self._print(
            f"measured: {show_speed(speed.seconds_per_step)}, {show_duration(speed.seconds_left)} left"
            f"{memory}; the first step took {speed.first_step_seconds:.1f} s"
        )

    def recall(self, metrics: Path, step: int) -> None:
        """Begin the trends of a run that resumes after a step with the rows in its ``metrics.jsonl``."""
        for row in read_rows(metrics, MAX_POINTS // 2).rows:
            with suppress(TypeError, ValueError, LookupError):  # a damaged row is no reason to stop
                if row["step"] <= step:
                    self._extend(row)

    def _extend(self, row: Mapping[str, Any]) -> None:
        """Add a row to the trends."""
        self._seen += 1
        if (self._seen - 1) % self._stride == 0:
            for key, value in _curves(row):
                self._history.setdefault(key, []).append(value)
            if max(map(len, self._history.values()), default=0) >= MAX_POINTS:
                self._stride *= 2
                self._history = {key: values[::2] for key, values in self._history.items()}

    def update(self, row: Mapping[str, Any]) -> None:
        """Show another row."""
        self._row, self._phase = row, None
        self._evaluation = row.get("evaluation") or self._evaluation
        if self._first is None:
            self._first = (row.get("step", 0), row.get("seconds", 0.0))
        self._extend(row)
        last = row.get("step", 0) >= self.total
        if self._live is None and ((self._seen - 1) % self.every == 0 or last):
            self._print_row()
        if last:
            self._set_phase("finishing")

    def warn(self, text: str) -> None:
        """Show a warning that stays in view."""
        step = self._row.get("step", 0)
        self.warnings.append(f"step {step}: {text}")
        if self._live is None:
            self._print(f"warning, step {step}: {text}")

    def info(self, text: str) -> None:
        """Print a line above the view; without a terminal, after the latest row."""
        if self._live is None:
            self._print_row()
        self._print(text)

    def line(self) -> str:
        """Return the latest row as one line of plain text."""
        row = self._row
        parts = [f"step {self.step}/{self.total}", self._speed(), self._rate(), self._remaining()]
        if "drift" in row:
            parts.append("drift " + " ".join(_number(d) for d in row["drift"]))
        if self._evaluation is not None:
            parts.append(f"{self._evaluation['metric']} {_number(_best(self._evaluation))}")
        for key in ("spread", "diversity", *CHUNKS, "reconstruction", "classification", "accuracy"):
            if row.get(key) is not None:
                parts.append(f"{key.replace('_', ' ')} {_number(row[key])}")
        if "gradient_norm" in row:
            parts.append(f"gradient norm {_number(row['gradient_norm'])}")
        if row.get("skipped"):
            parts.append(f"{row['skipped']} steps skipped")
        return ", ".join(p for p in parts if p)

    @property
    def step(self) -> int:
        """Number of steps that are done."""
        return int(self._row.get("step", 0)) if self._step is None else self._step

    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the speed so far; None if there is no speed yet."""
        if self._seconds_per_step is not None:
            return (self.total - self.step) * self._seconds_per_step
        if self._first is None or "seconds" not in self._row:
            return None
        steps, seconds = (self._row[k] - b for k, b in zip(("step", "seconds"), self._first, strict=True))
        return float((self.total - self._row["step"]) * seconds / steps) if steps > 0 else None

    def render(self) -> RenderableType:
        """Return the content of the live view."""
        row, step = self._row, self.step
        head = Table.grid(expand=True, padding=(0, 1, 0, 0))
        for ratio in (None, 1, None, None):
            head.add_column(no_wrap=True, ratio=ratio)
        head.add_row(
            Text(self.title if len(self.title) < 32 else "…" + self.title[-30:], style="bold"),
            ProgressBar(total=self.total, completed=step),
            f"{step}/{self.total}",
            self._remaining(),
        )
        memory = f"{_number(row['memory_gib'])} GiB" if row.get("memory_gib") else ""
        skipped = f"[red]{row['skipped']} steps skipped[/]" if row.get("skipped") else ""
        parts: list[RenderableType] = [head]
        rate = f"learning rate {_number(row['learning_rate'])}" if "learning_rate" in row else ""
        facts = [self._speed(), self._rate(), memory, rate, skipped]
        if any(facts):
            parts.append(Text.from_markup(" · ".join(f for f in facts if f), style="dim"))
        body = Table.grid(padding=(0, 1, 0, 0))
        for _ in range(4):
            body.add_column(no_wrap=True)
        for name, key, value, note in self._figures():
            trend = sparkline(self._history.get(key, []))
            body.add_row(name, value, Text(trend, style="cyan"), Text(note, "dim"))
        parts.append(body)
        warnings = Table.grid(padding=(0, 1, 0, 0))
        for text in tuple(self.warnings):
            warnings.add_row(Text("!", "bold yellow"), Text(text))
        parts += [warnings] if self.warnings else []
        return RightMargin(Group(*parts))

    def _figures(self) -> list[tuple[str, str, str, str]]:
        row, figures = self._row, []
        for i, drift in enumerate(row.get("drift", [])):
            tau = f"{self.temperatures[i]:g}" if i < len(self.temperatures) else str(i + 1)
            note = "falls toward equilibrium" if i == 0 else ""
            figures.append((f"raw drift τ={tau}", f"drift {i}", _number(drift), note))
        if self._evaluation is not None:
            metric, count = self._evaluation["metric"], self._evaluation["samples"]
            note = f"best average, {count:,} samples"
            figures.append((metric, "evaluation", _number(_best(self._evaluation)), note))
        notes = {
            "spread": "all samples; data: 1",
            "diversity": "in a class; data: 1",
            "energy_score": "held out; lower is better",
            "chunk_error": "held out",
            "chunk_spread": "of one observation",
            "reconstruction": "averaged weights",
            "classification": "",
            "accuracy": "averaged weights",
            "gradient_norm": "before clipping",
            "alpha": "mean over the step",
            "loss": "flat by design" if "drift" in row else "",
        }
        names = {key: key.replace("_", " ") for key in ("gradient_norm", *CHUNKS)} | {"alpha": "guidance α"}
        for key, note in notes.items():
            if row.get(key) is not None:
                live = row.get(f"batch_{key}")  # of the trained weights, beside that of their average
                note += "" if live is None else f"; live {_number(live)}"
                figures.append((names.get(key, key), key, _number(row[key]), note))
        return figures

    def _speed(self) -> str:
        return "" if self._seconds_per_step is None else show_speed(self._seconds_per_step)

    def _rate(self) -> str:
        """Return the samples per second over the same steps as the steps per second beside it."""
        rate = self._row.get("samples_per_second")
        if self._seconds_per_step is not None and self._samples_per_step is not None:
            rate = self._samples_per_step / max(self._seconds_per_step, 1e-9)
        return "" if rate is None else f"{rate:,.0f} samples/s" if rate >= 10 else f"{rate:.1f} samples/s"

    def _remaining(self) -> str:
        """Return the time left, or how long the work before the end of the first step has taken."""
        if self._phase is not None:
            return f"{self._phase} {show_duration(time.monotonic() - self._phase_began)}"
        seconds = self.seconds_left()
        return f"{show_duration(seconds)} left" if seconds is not None and seconds > 0 else ""

    def _set_phase(self, phase: str) -> None:
        self._phase, self._phase_began = phase, time.monotonic()

    def _beat(self) -> None:
        """Print a line whenever nothing was printed for a while."""
        while not self._left.wait(max(self._printed + self._heartbeat - time.monotonic(), 0.01)):
            if time.monotonic() - self._printed < self._heartbeat:
                continue
            if self._row is self._printed_row:  # its figures are in a line above
                parts = [f"step {self.step}/{self.total}", self._speed(), self._remaining()]
                self._print(", ".join(part for part in parts if part))
            else:
                self._print_row()

    def _print_row(self) -> None:
        """Print the latest row, unless that is done."""
        with self._lock:
            if self._row is not self._printed_row:
                self._printed_row = self._row
                self._print(self.line())

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        console = self._live.console if self._live is not None else self.console
        shown = wrap_line(text, console.width) if console.is_terminal else text
        console.print(Text(shown), soft_wrap=True)


def wrap_line(text: str, width: int) -> str:
    """Wrap a line at spaces. A command at its end gets a line of its own and stays whole, to be copied."""
    if len(text) <= width:
        return text
    command = COMMAND.search(text)
    head = text if command is None else text[: command.start()].rstrip()
    lines = textwrap.wrap(head, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines if command is None else [*lines, f"  {command[0]}"])


def facts_text(rows: Mapping[str, str], width: int = 80, *, whole: Collection[str] = ()) -> Text:
    """Return labels and texts as two columns without trailing spaces, for a terminal or a file.

    Texts are wrapped to a width, except those of the labels in ``whole``: a command is to be copied.
    """
    indent = max(map(len, rows), default=0) + 2
    text = Text()
    for label, value in rows.items():
        wrapped = textwrap.wrap(value, max(width - indent, 20), break_on_hyphens=False) or [""]
        lines = [value] if label in whole else wrapped
        text.append(f"{label:{indent}}", "bold").append(f"\n{'':{indent}}".join(lines)).append("\n")
    text.rstrip()
    return text


def sparkline(values: Sequence[float], width: int = TREND) -> str:
    """Return the trend as block characters, one per bin of values; logarithmic if all values are positive."""
    if not values:
        return ""
    count = min(width, len(values))
    bins = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in bins]
    if min(means) > 0:
        means = [math.log(m) for m in means]
    low, high = min(means), max(means)
    if high - low < 0.02:
        return BARS[3] * count
    return "".join(BARS[round((m - low) / (high - low) * (len(BARS) - 1))] for m in means)


def _best(evaluation: Mapping[str, Any]) -> float:
    """Return the lowest distance of all averages."""
    return min(float(row[evaluation["metric"]]) for row in evaluation["ema"].values())


def _curves(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    flat = {k: v for k, v in row.items() if isinstance(v, int | float)}
    if row.get("evaluation"):
        flat["evaluation"] = _best(row["evaluation"])
    flat |= {f"drift {i}": v for i, v in enumerate(row.get("drift", []))}
    return [(k, float(v)) for k, v in flat.items() if v is not None and math.isfinite(v)]


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "?"
    return f"{value:.3g}" if abs(value) < 1000 or abs(value) >= 1e6 else f"{value:,.0f}"
