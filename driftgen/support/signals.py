"""Ctrl-C and SIGTERM as requests to save and stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["handle_signals", "interrupt", "interruptions"]

# Signals that raised KeyboardInterrupt in the command. Libraries in C may turn it into another exception: an
# exception after a signal is no fault of the input.
interruptions: list[int] = []
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def handle_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call ``stop(name)`` on Ctrl-C and SIGTERM; restore the previous handlers at the end.

    Does nothing outside the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: Any) -> None:
        stop(NAMES[signal.Signals(number)])

    previous = {number: signal.signal(number, handle) for number in NAMES}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, and note that it was raised."""
    interruptions.append(number)
    raise KeyboardInterrupt
