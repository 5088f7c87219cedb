"""Ctrl-C and SIGTERM as requests to save and stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["handle_signals"]

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
