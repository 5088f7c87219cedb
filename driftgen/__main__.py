"""The ``driftgen`` command. Ctrl-C ends it quietly, also while it imports its libraries."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if Ctrl-C is ignored
        signal.signal(signal.SIGINT, _interrupt)
    from driftgen.cli import main

    main()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process in the middle of an import, where an exception may be lost; else raise.

    Initialization in C and ``except ImportError`` of libraries turn a KeyboardInterrupt into other errors.
    Nothing is being written while a library is imported.
    """
    place = frame
    while place is not None:
        if place.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"driftgen: interrupted\n")
            os._exit(130)
        place = place.f_back
    signal.default_int_handler(number, frame)


if __name__ == "__main__":
    main()
