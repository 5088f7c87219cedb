"""Ctrl-C and SIGTERM during a run: stop after saving, and a hint how to resume at every moment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgen.support.lost_process import LostProcessError, is_lost_process
from driftgen.support.signals import handle_signals
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.run_folder import CHECKPOINTS, CONFIG

__all__ = ["StopRequest", "StoppedAfterLastStep", "resume_hint"]


class StoppedAfterLastStep(KeyboardInterrupt):
    """A signal arrived after the last step: the run is complete, but what follows it must not begin."""


class StopRequest:
    """Signals that a loop receives: the first asks it to save and stop, the second raises.

    Args:
        info: prints a line.

    Attributes:
        signal: name of the first signal; None if there was none.
        last_step_done: True after the last step, when only saving and the report are left.
    """

    def __init__(self, info: Callable[[str], None]) -> None:
        self.info = info
        self.signal: str | None = None
        self.last_step_done = False

    def receive(self, name: str) -> None:
        """Note the first signal; the second raises ``KeyboardInterrupt``."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = name
        next_action = "saving the complete run" if self.last_step_done else "saving after this step"
        # In a thread: a signal handler must not write while the interrupted code writes.
        text = f"{name}: {next_action}; once more stops at once, without saving"
        threading.Thread(target=self.info, args=(text,), daemon=True).start()

    def explains(self, error: Exception, work: str) -> bool:
        """Return True, and print it, if a signal explains an error.

        Ctrl-C also reaches child processes, such as a compiler.
        """
        if self.signal is None:
            return False
        reason = " ".join(str(error).split())[:200]
        self.info(f"{work} was interrupted ({type(error).__name__}: {reason})")
        return True


@contextmanager
def resume_hint(
    run: Callable[[], Path | None], command: Callable[[], str], info: Callable[[str], None]
) -> Iterator[None]:
    """Print how to resume when a signal ends the block, outside the loop or as the second one.

    If another process of the group has ended, raise a LostProcessError that says the same.

    Args:
        run: returns the folder of the run that began last; None if no run has begun.
        command: returns what to type to resume.
        info: prints a line.
    """
    try:
        with handle_signals(_interrupt):
            yield
    except KeyboardInterrupt:
        folder = run()
        if folder is not None and (folder / CONFIG).is_file():
            info(f"stopped {folder}: {_saved_so_far(folder)}; run the same command to resume: {command()}")
        raise
    except RuntimeError as error:
        folder = run()
        if folder is None or not is_lost_process(error):
            raise
        raise LostProcessError(
            f"another process of {folder} has ended: {_saved_so_far(folder)}; its own message, or one of the "
            f"system that stopped it, says why; run the same command to resume: {command()}"
        ) from None


def _saved_so_far(folder: Path) -> str:
    """Return the last checkpoint of a run in words."""
    steps = Checkpoints(folder / CHECKPOINTS).steps
    return f"its last checkpoint is of step {steps[-1]}" if steps else "it has no checkpoint yet"


def _interrupt(name: str) -> None:
    raise KeyboardInterrupt
