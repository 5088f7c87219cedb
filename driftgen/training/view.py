"""The protocol of the display of a run: a terminal, a log, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from driftgen.training.step_clock import Speed
from driftgen.training.summary import Summary

__all__ = ["View"]


class View(Protocol):
    """Display of a run."""

    def begin(self, summary: Summary) -> None:
        """Show the summary of a run; its first step begins."""
        ...

    def advance(self, step: int, seconds_per_step: float | None) -> None:
        """Show that this many steps are done. Called after every step; the speed is None if not known."""
        ...

    def measured(self, speed: Speed) -> None:
        """Show the speed, once it is known."""
        ...

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics."""
        ...

    def info(self, text: str) -> None:
        """Show a message."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning."""
        ...
