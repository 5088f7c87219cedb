"""Atomic writes of files and folders, and checked output folders."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgen.errors import InputError

__all__ = [
    "PARTIAL",
    "REPLACED",
    "SCRATCH",
    "append_line",
    "atomic_folder",
    "atomic_write",
    "check_free",
    "check_replaceable",
    "honor_umask",
    "is_written",
    "make_folder",
    "remove_open_scratch",
    "remove_scratch",
]

# Endings of the parts of a file that takes several calls, and of folders that are being replaced.
PARTIAL, REPLACED = ".partial", ".replaced"
open_scratch: set[Path] = set()  # of this process
SCRATCH = ".partial-"  # beginning of the names of folders for what is being written


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success and is deleted on failure.

    An interrupted write leaves the old file or the new one, never a partial file. A link at ``path`` is
    replaced, and its target is left alone. The mode of the file is that of the umask, see
    :func:`honor_umask`. A device or a pipe is refused: root would replace ``/dev/null`` by a file.
    """
    check_replaceable(path)
    with _scratch_folder(path) as folder:
        scratch = folder / path.name
        yield scratch
        honor_umask(scratch)
        scratch.replace(path)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder that replaces ``path`` on success and is deleted on failure.

    An interrupted write leaves the old folder or the new one, complete. A folder takes two renames to be
    replaced: a kill between them leaves the old one as ``NAME.replaced``, and the next write restores it. A
    link at ``path`` is replaced, and its target is left alone.
    """
    replaced = path.with_name(path.name + REPLACED)
    check_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _restore(path, replaced)
    with _scratch_folder(path) as folder:
        scratch = folder / path.name
        scratch.mkdir()
        try:
            yield scratch
            if os.path.lexists(path):
                path.replace(replaced)
            scratch.replace(path)
        finally:
            _restore(path, replaced)


def check_replaceable(path: Path) -> None:
    """Raise an InputError for what exists and is no file, folder or link."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise InputError(f"{path} is a device, a pipe or a socket: give the name of a file")


@contextmanager
def _scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside ``path`` that only this user can enter, and remove it.

    Its name is random and it is created exclusively: what is written into it follows no link that somebody
    else has made. Errors name ``path``.
    """
    # The name is chosen first: Ctrl-C between making the folder and knowing its name would leave it behind.
    folder = path.parent / f"{SCRATCH}{secrets.token_hex(8)}"
    open_scratch.add(folder)
    try:
        folder.mkdir(mode=0o700)
        yield folder
    except OSError as error:
        for name in ("filename", "filename2"):
            inside = getattr(error, name)
            if isinstance(inside, str | os.PathLike) and SCRATCH in os.fspath(inside):
                setattr(error, name, str(path))
        raise
    finally:
        try:
            shutil.rmtree(folder, ignore_errors=True)
        except KeyboardInterrupt:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            open_scratch.discard(folder)


def remove_open_scratch() -> None:
    """Remove the folders of writes that are under way in this process, which is about to end."""
    for folder in tuple(open_scratch):
        shutil.rmtree(folder, ignore_errors=True)


def remove_scratch(folder: Path) -> None:
    """Remove what killed writes left in a folder and in the folders in it. Nobody else may write there."""
    for pattern in (f"{SCRATCH}*", f"*/{SCRATCH}*"):
        for path in folder.glob(pattern):
            if not path.is_symlink() and not path.parent.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def _restore(path: Path, replaced: Path) -> None:
    """Remove a replaced folder, or rename it back if no other took its place."""
    if replaced.is_symlink() or replaced.is_file():
        replaced.unlink()  # a link or a file at the place of a folder is not restored
    elif replaced.exists():
        if os.path.lexists(path):
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.replace(path)


def honor_umask(path: Path) -> None:
    """Give a private file (mode 0600) the mode that the umask gives to new files; keep any other mode.

    Libraries that write through a temporary file, such as safetensors, leave private files behind.
    """
    if stat.S_IMODE(path.stat().st_mode) != 0o600:
        return
    # Python can only read the umask by changing it, which other threads would notice: create a file instead.
    with _scratch_folder(path) as folder:
        probe = folder / path.name
        probe.touch()
        path.chmod(stat.S_IMODE(probe.stat().st_mode))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, which is created if needed. A link is an error, its target stays as it is."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{path} is a link: replace it by the file it points to") from None
        raise
    with open(handle, "wb") as file:
        file.write(f"{line}\n".encode())


def make_folder(path: Path) -> Path:
    """Create the folder if needed, check that it is writable, and return it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; choose another folder with --out"
        ) from None
    if not os.access(path, os.W_OK):
        raise InputError(f"cannot write to {path}: no permission; choose another folder with --out")
    return path


def check_free(folder: Path) -> None:
    """Raise unless the folder does not exist yet or is empty, but for what killed writes left."""
    if folder.exists() and (not folder.is_dir() or any(map(is_written, folder.iterdir()))):
        raise InputError(f"{folder} exists and is not an empty folder: choose another one")


def is_written(path: Path) -> bool:
    """Return False for the scratch of a write that is going on or was killed."""
    return not path.name.startswith(SCRATCH)
