"""Ctrl-C and SIGTERM as requests to save and stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

__all__ = ["handle_signals", "interrupt", "interruptions", "stop_signals", "terminable"]

# Signals that raised KeyboardInterrupt in the command. Libraries in C may turn it into another exception: an
# exception after a signal is no fault of the input.
interruptions: list[int] = []


def stop_signals() -> dict[int, str]:
    """Return the signals that ask a command to stop, and what they are called."""
    names: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
    if hasattr(signal, "SIGBREAK"):  # Windows: the one signal that another process can send
        names[signal.SIGBREAK] = "Ctrl-Break"
    return names


@contextmanager
def handle_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Call ``stop(name)`` on a signal of :func:`stop_signals`; restore the previous handlers at the end.

    Does nothing outside the main thread, where Python allows no signal handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    names = stop_signals()

    def handle(number: int, frame: Any) -> None:
        stop(names[number])

    previous = {number: signal.signal(number, handle) for number in names}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt while the block runs, so that the block removes its files."""
    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, and note that it was raised."""
    interruptions.append(number)
    raise KeyboardInterrupt
