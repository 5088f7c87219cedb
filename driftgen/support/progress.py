"""The progress bar of long-running work: rate, remaining time and one metric."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

__all__ = ["RightMargin", "drawing", "show_metric", "track"]

EVERY_SECONDS = 10.0  # between lines of redirected output
ECHO = 4  # columns of ^C, pressed twice


class RightMargin:
    """Content of a live view that leaves the last columns free, where a terminal echoes ^C.

    At the end of a full line the echo would wrap. The next refresh would then begin one line too low and
    leave a second copy of the first line.
    """

    def __init__(self, content: RenderableType) -> None:
        self.content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.content, options.update_width(max(options.max_width - ECHO, 1)))


class _Bar(Progress):
    def get_renderables(self) -> Iterable[RenderableType]:
        yield RightMargin(self.make_tasks_table(self.tasks))


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f}/s", style="progress.data.speed")


@contextmanager
def track(
    title: str, total: int, metric: str, console: Console | None = None
) -> Iterator[Callable[[int, float], None]]:
    """Show a progress bar during the block; yield a function that takes the step and the metric's value.

    Without a terminal, print a line every 10 seconds and at the end.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal:
        lines = _Lines(title, total, metric, console)
        try:
            yield lines.update
        finally:
            lines.close()
        return
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=2, no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=2)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _Rate(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[value]}", table_column=Column(no_wrap=True)),
    )
    with _Bar(*columns, console=console, expand=True) as progress:
        task = progress.add_task(escape(title), total=total, value=metric)
        yield lambda step, value: progress.update(task, completed=step, value=show_metric(metric, value))


def show_metric(metric: str, value: float) -> str:
    """Return ``drift 0.0206``; for a unit, ``20.6 ms`` or ``1 network call per image``."""
    unit, space, rest = metric.partition(" ")
    if unit == "s":
        return (f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms") + space + rest
    if metric.startswith("network calls"):
        return f"{value:.3g} network call{'' if value == 1 else 's'}{metric.removeprefix('network calls')}"
    return f"{value:.3g} {metric}" if unit == "ms" else f"{metric} {value:.3g}"


class _Lines:
    """Prints the progress as plain lines, for redirected output."""

    def __init__(self, title: str, total: int, metric: str, console: Console) -> None:
        self.title, self.total, self.metric, self.console = title, total, metric, console
        self._began = self._printed = time.monotonic()
        self._first: int | None = None  # a resumed task does not begin at 0
        self._line = ""

    def update(self, step: int, value: float) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first, self._began = step, now
        rate = (step - self._first) / max(now - self._began, 1e-9)
        parts = [f"{self.title} {step}/{self.total}", show_metric(self.metric, value)]
        if rate > 0:
            parts.insert(1, f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.3g}/s")
            if step < self.total:
                parts.insert(2, f"{timedelta(seconds=round((self.total - step) / rate))} left")
        self._line = ", ".join(parts)
        if now - self._printed >= EVERY_SECONDS:
            self.close()
            self._printed = now

    def close(self) -> None:
        """Print the last state, unless that is done."""
        if self._line:
            self.console.print(Text(self._line), soft_wrap=True)
        self._line = ""


@contextmanager
def drawing() -> Iterator[None]:
    """Show a spinner while figures are drawn."""
    with Console(stderr=True).status("drawing figures"):
        yield
