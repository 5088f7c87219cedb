"""The ``driftgen`` command. Ctrl-C ends it without a traceback at every moment: also while it imports its
libraries, in a finalizer, and while the interpreter exits."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

__all__ = ["main"]

COMMAND = "driftgen.cli.root", "run_command"
REPEAT_AFTER = 0.02  # seconds: the finalizer that lost Ctrl-C has ended by then


def main() -> None:
    """Run the command."""
    # Before torch is loaded. Threads that wait for each other spin for milliseconds by default: on cores that
    # another program uses, too, they keep the one that they wait for from running. Microseconds suffice.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not if Ctrl-C is ignored
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _repeat_lost_interrupt
    from driftgen.cli import main

    try:
        main()
    except SystemExit as end:
        _keep_exit_code(end.code if isinstance(end.code, int) else 0)
        raise


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt inside the command, which catches it; end the process everywhere else.

    Initialization in C and ``except ImportError`` of libraries turn a KeyboardInterrupt into other errors.
    Nothing is being written before and after the command.
    """
    running, place = False, frame
    while place is not None:
        if place.f_code.co_filename.startswith("<frozen importlib"):
            running = False
            break
        running = running or (place.f_globals.get("__name__"), place.f_code.co_name) == COMMAND
        place = place.f_back
    if running:
        from driftgen.cli.root import interrupt

        interrupt(number, frame)
    # The command may import a library while it writes a file.
    clean_up = getattr(sys.modules.get(COMMAND[0]), "remove_open_scratch", None)
    if clean_up is not None:
        clean_up()
    os.write(2, b"driftgen: interrupted\n")
    os._exit(130)


def _repeat_lost_interrupt(unraisable: sys.UnraisableHookArgs) -> None:
    """Send Ctrl-C again after a finalizer or a callback, out of which no exception is raised."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(REPEAT_AFTER, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


def _keep_exit_code(code: int) -> None:
    """Let the interpreter exit with the code of the command, which has ended.

    The first signal changes nothing; the second ends the process at once, in case the exit takes long.
    """
    received = False

    def receive(number: int, frame: FrameType | None) -> None:
        nonlocal received
        if received:
            os._exit(code)
        received = True

    with suppress(OSError, ValueError):  # a closed pipe: Python reports it at exit
        sys.stdout.flush()
    usual = {signal.SIGINT: _interrupt, signal.SIGTERM: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) is handler:
            signal.signal(number, receive)


if __name__ == "__main__":
    main()
