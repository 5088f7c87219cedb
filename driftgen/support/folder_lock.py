"""Locks on files and folders: one group of processes at a time writes a folder.

The kernel owns the locks: it releases those of a process that dies, on network file systems as far as their
servers support it. POSIX locks belong to one process, so that forked workers hold none and cannot outlive it;
threads of one process are not told apart. Windows locks bytes of the file through ``msvcrt``. File systems
without locks let every process pass.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from driftgen.errors import InputError
from driftgen.support.atomic_write import is_written, make_folder, remove_scratch
from driftgen.support.distributed import Distributed
from driftgen.support.provenance import command_line

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "LockFile", "check_not_held", "hold_file", "hold_folder", "is_empty"]

LOCK = "driftgen.lock"
# First byte that is locked. Windows denies reading of locked bytes: the text about the holder is before it.
FIRST_BYTE = 2**30
LONGEST_TEXT = 4096  # bytes of the text about the holder
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EDEADLK)


class LockFile:
    """A file whose bytes are locks. Closing it, or the end of the process, releases them.

    Args:
        path: created if it does not exist. A link or a special file is an error.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._file = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise InputError(f"{path} is no regular file: remove it") from None
            raise
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            os.close(self._file)
            raise InputError(f"{path} is no regular file: remove it")

    def __enter__(self) -> LockFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def acquire(self, number: int = 0, *, wait: bool = False) -> bool:
        """Lock a byte; return False if another process holds it."""
        try:
            if fcntl is not None:
                mode = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
                fcntl.lockf(self._file, mode, 1, FIRST_BYTE + number)
            else:
                _lock_on_windows(self._file, FIRST_BYTE + number, wait)
        except OSError as error:
            return error.errno not in TAKEN  # others: the file system has no locks
        return True

    def release(self, number: int = 0) -> None:
        """Unlock a byte."""
        with suppress(OSError):
            if fcntl is not None:
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, FIRST_BYTE + number)
            else:
                _unlock_on_windows(self._file, FIRST_BYTE + number)

    @contextmanager
    def locked(self, number: int, *, wait: bool = False) -> Iterator[bool]:
        """Lock a byte in a block; yield False if another process holds it."""
        acquired = self.acquire(number, wait=wait)
        try:
            yield acquired
        finally:
            if acquired:
                self.release(number)

    @property
    def current(self) -> bool:
        """False if the file was removed or replaced after it was opened."""
        try:
            return os.path.samestat(os.fstat(self._file), self.path.lstat())
        except OSError:
            return False

    def describe(self) -> None:
        """Write process, host and command of the holder into the file."""
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
            "command": command_line(),
        }
        text = json.dumps(record).encode()
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        os.write(
            self._file, text if len(text) <= LONGEST_TEXT else json.dumps(record | {"command": ""}).encode()
        )

    def holder(self) -> str:
        """Return the process that holds the file in words, as far as the file names it."""
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            record = json.loads(os.read(self._file, LONGEST_TEXT))
            pid, host, since = int(record["pid"]), str(record["host"])[:100], str(record["since"])[:20]
            command = f": {str(record['command'])[:100]}" if record.get("command") else ""
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            return "another process"
        return f"process {pid} on {host} (since {since}{command})"


def _lock_on_windows(file: int, position: int, wait: bool) -> None:
    import msvcrt

    os.lseek(file, position, os.SEEK_SET)
    while True:
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
            return
        except OSError:
            if not wait:
                raise
            time.sleep(0.1)


def _unlock_on_windows(file: int, position: int) -> None:
    import msvcrt

    os.lseek(file, position, os.SEEK_SET)
    msvcrt.locking(file, msvcrt.LK_UNLCK, 1)  # type: ignore[attr-defined]


@contextmanager
def hold_folder(folder: Path, processes: Distributed | None = None) -> Iterator[None]:
    """Create a folder if needed, and hold it until the block ends.

    The main process of a group holds the folder for all. Scratch files of a killed holder are removed.
    Folders that were created here and are empty at the end are removed.

    Args:
        folder: to hold.
        processes: the group, all of which enter the block; None for this process alone.
    """
    with _hold(folder / LOCK, folder, processes):
        yield


@contextmanager
def hold_file(path: Path, processes: Distributed | None = None) -> Iterator[None]:
    """Hold a file that is written in parts, as :func:`hold_folder` holds a folder."""
    with _hold(path.with_name(f"{path.name}.lock"), path, processes):
        yield


@contextmanager
def _hold(place: Path, shown: Path, processes: Distributed | None) -> Iterator[None]:
    held: list[LockFile] = []
    folder = place.parent
    created = [path for path in (folder, *folder.parents) if not path.exists()]

    def acquire() -> None:
        make_folder(folder)
        held.append(_acquire(place, shown))
        if place.name == LOCK:
            remove_scratch(folder)

    if processes is None:
        acquire()
    else:
        processes.run_main(acquire)
    try:
        yield
    finally:
        for lock in held:
            with lock, suppress(OSError):
                place.unlink()  # while it is held: a process that opened it before notices
            with suppress(OSError):
                for path in created:
                    path.rmdir()


def _acquire(place: Path, shown: Path) -> LockFile:
    while True:
        lock = LockFile(place)
        if not lock.acquire():
            with lock:
                raise _in_use(shown, lock)
        if lock.current:
            lock.describe()
            return lock
        with lock:  # its last holder removed the file after this process had opened it
            pass


def _in_use(shown: Path, lock: LockFile) -> InputError:
    return InputError(
        f"{shown} is in use by {lock.holder()}: wait for it, stop it, or use another --out",
        topic="folder-in-use",
    )


def check_not_held(folder: Path) -> None:
    """Raise if another process holds the folder, before anything slow is done."""
    if (folder / LOCK).is_file():
        with LockFile(folder / LOCK) as lock:
            if not lock.acquire():
                raise _in_use(folder, lock)


def is_empty(folder: Path) -> bool:
    """Return True if a folder does not exist, or has no files but a lock and what killed writes left."""
    return not folder.exists() or not any(p.name != LOCK and is_written(p) for p in folder.iterdir())
