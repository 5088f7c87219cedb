"""Time per step of a run, without its first step, which compiles."""

from __future__ import annotations

import time
from dataclasses import dataclass

__all__ = ["Speed", "StepClock", "show_duration", "show_speed"]

# A speed is known after this many further steps, or after this many seconds of slow ones.
KNOWN_STEPS, KNOWN_SECONDS = 5, 10.0


@dataclass(frozen=True)
class Speed:
    """Speed of a run, once it is known.

    Attributes:
        seconds_per_step: mean over the steps so far, metrics and previews included.
        seconds_left: to the last step.
        first_step_seconds: of the first step since the start or resume.
        memory_bytes: peak memory so far; None if the system does not tell.
    """

    seconds_per_step: float
    seconds_left: float
    first_step_seconds: float
    memory_bytes: int | None


class StepClock:
    """Measures the steps since :meth:`start`.

    Attributes:
        first_step_seconds: of the first step; None before its end.
    """

    def __init__(self) -> None:
        self.first_step_seconds: float | None = None
        self._started = self._first_ended = self._last = time.monotonic()
        self._steps = 0  # after the first one
        self._known = False

    def start(self) -> None:
        """Begin the first step."""
        self._started, self.first_step_seconds = time.monotonic(), None
        self._steps, self._known = 0, False

    def tick(self) -> bool:
        """End a step; return True if the speed has become known with it."""
        self._last = time.monotonic()
        if self.first_step_seconds is None:
            self.first_step_seconds, self._first_ended = self._last - self._started, self._last
            return False
        self._steps += 1
        known = self._steps >= KNOWN_STEPS or self._last - self._first_ended >= KNOWN_SECONDS
        became_known, self._known = known and not self._known, known
        return became_known

    @property
    def seconds_per_step(self) -> float | None:
        """Mean since the end of the first step; None before the second step ends."""
        return (self._last - self._first_ended) / self._steps if self._steps else None


def show_duration(seconds: float) -> str:
    """Return a duration as ``4:05``, ``1:20:00`` or ``3 d 2 h``."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def show_speed(seconds_per_step: float) -> str:
    """Return ``2.5 s/step``, or ``31 steps/s`` for short steps."""
    if seconds_per_step >= 0.1:
        return f"{seconds_per_step:.3g} s/step"
    return f"{1 / max(seconds_per_step, 1e-9):,.3g} steps/s"
