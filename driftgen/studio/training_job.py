"""The second half of the Train tab: a training that outlives the page and the studio, one at a time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import psutil

from driftgen.errors import InputError
from driftgen.studio.folder_check import TrainCommand
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.untrusted_files import open_regular, read_json

__all__ = ["JobState", "TrainingJob"]

FOLDER = ".studio"  # in the folder of runs: the record and the log of the last training
LOG_BYTES = 8192  # of the end of the log that is shown
CLOCK_SECONDS = 2.0  # a clock that is set moves the time at which processes began
# Colors and cursor movements of a terminal.
ESCAPES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


class JobState(NamedTuple):
    """The last training that a studio started.

    Attributes:
        running: True if its process runs.
        text: its state in a sentence.
        command: as one types it; "" if there was none.
        run: name of the run's folder.
        log: the last lines that it printed.
    """

    running: bool
    text: str
    command: str = ""
    run: str = ""
    log: str = ""


class TrainingJob:
    """Starts, watches and stops one training at a time.

    The process has a session of its own: closing the page or ending the studio leaves it alone. A studio
    that is started later finds it by the record in the folder of runs.

    Args:
        folders: whose folder of runs holds the run, the record and the log.
    """

    def __init__(self, folders: ReadableFolders) -> None:
        self.folders = folders
        self._record, self._log = folders.runs / FOLDER / "job.json", folders.runs / FOLDER / "log.txt"
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._asked: int | None = None  # id of the process that has been asked to stop

    def start(self, command: TrainCommand) -> JobState:
        """Start a training; raise if one runs."""
        with self._lock:
            before = self.state()
            if before.running:
                raise InputError(f"{before.run} is training: stop it first, one training runs at a time")
            make_folder(self.folders.check(self._log.parent))
            # A link of this name would overwrite its target, in a folder of runs that someone else sent.
            self._log.unlink(missing_ok=True)
            with self._log.open("xb") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "driftgen", *command.words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
                    env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
                )
            record = {
                "pid": self._child.pid,
                "began": _began(self._child.pid),
                "command": command.text,
                "run": command.out.name,
                "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            }
            with atomic_write(self._record) as scratch:
                scratch.write_text(json.dumps(record), encoding="utf-8")
            return self.state()

    def stop(self) -> JobState:
        """Ask the training to save and stop, as Ctrl-C does; the second time it stops at once."""
        with self._lock:
            record, state = self._read(), self.state()
            if not state.running:
                raise InputError("no training runs that could be stopped")
            # Windows sends nothing but Ctrl-Break to another process.
            os.kill(record["pid"], getattr(signal, "CTRL_BREAK_EVENT", signal.SIGINT))
            self._asked = record["pid"]
            return state._replace(text=_asked_to_stop(state.run))

    def state(self) -> JobState:
        """Return the state of the last training."""
        record = self._read()
        if not record:
            return JobState(False, "No training has been started from this page.")
        running, code = self._alive(record)
        log, run = self._tail(), record["run"]
        if running and self._asked == record["pid"]:
            text = _asked_to_stop(run)
        elif running:
            text = f"{run} has been training since {record['since']}. It continues when this page is closed."
        elif code == 0:
            text = f"{run} is complete."
        elif code == 130:
            text = f"{run} was stopped: the same command resumes it from its last checkpoint."
        elif code is None:
            text = f"{run} is no longer running; its curves show how far it got. The same command resumes it."
        else:
            text = f"{run} ended with exit code {code}: the last lines say why."
        return JobState(running, text, record["command"], run, log)

    def _alive(self, record: dict[str, Any]) -> tuple[bool, int | None]:
        """Return whether the process of a record runs, and its exit code if this studio started it."""
        if self._child is not None and self._child.pid == record["pid"]:
            code = self._child.poll()
            return code is None, code
        # The id may belong to another process by now, which began at another time.
        now, then = _began(record["pid"]), record["began"]
        known = now is not None and isinstance(then, float)  # an integer may be too large for one
        return known and abs(now - then) < CLOCK_SECONDS, None

    def _read(self) -> dict[str, Any]:
        try:
            self.folders.check(self._record)
            record = read_json(self._record, "the record of a training")
            kinds = {"pid": int, "command": str, "run": str, "since": str}
            valid = all(isinstance(record.get(key), kind) for key, kind in kinds.items())
        except (InputError, OSError):
            return {}
        return record if valid and record["pid"] > 1 and "began" in record else {}

    def _tail(self) -> str:
        """Return the last lines of the log, as a terminal would show them."""
        try:
            with open_regular(self.folders.check(self._log)) as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LOG_BYTES))
                text = file.read(LOG_BYTES).decode("utf-8", errors="replace")
        except (InputError, OSError):
            return ""
        lines = [ESCAPES.sub("", line).rpartition("\r")[2].rstrip() for line in text.splitlines()]
        return "\n".join([line for line in lines if line][-12:])


def _asked_to_stop(run: str) -> str:
    return (
        f"{run} has been asked to stop: it saves a checkpoint and the model first. Press Stop again to end "
        "it without saving."
    )


def _began(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970; None if there is no such process."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
