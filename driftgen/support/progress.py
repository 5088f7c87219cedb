"""The progress bar of long-running work: rate, remaining time and one metric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
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

__all__ = ["drawing", "track"]


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.0f}/s", style="progress.data.speed")


@contextmanager
def track(
    title: str, total: int, metric: str, console: Console | None = None
) -> Iterator[Callable[[int, float], None]]:
    """Show a progress bar during the block; yield a function that takes the step and the metric's value."""
    columns = (
        TextColumn("{task.description}", table_column=Column(ratio=2, no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=2)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        _Rate(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[value]}", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=console or Console(stderr=True), expand=True) as progress:
        task = progress.add_task(escape(title), total=total, value=metric)
        yield lambda step, value: progress.update(task, completed=step, value=f"{metric} {value:.3g}")


@contextmanager
def drawing() -> Iterator[None]:
    """Show a spinner while figures are drawn."""
    with Console(stderr=True).status("drawing figures"):
        yield
