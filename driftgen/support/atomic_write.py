"""Atomic writes of files and folders, and checked output folders."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgen.errors import InputError

__all__ = ["PARTIAL", "REPLACED", "atomic_folder", "atomic_write", "check_free", "honor_umask", "make_folder"]

# Endings of folders that are being written, and of folders that are being replaced.
PARTIAL, REPLACED = ".partial", ".replaced"


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success and is deleted on failure.

    An interrupted write leaves the old file or the new one, never a partial file. Its mode is that of the
    umask, see :func:`honor_umask`.
    """
    scratch = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield scratch
        honor_umask(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder that replaces ``path`` on success and is deleted on failure.

    An interrupted write leaves the old folder or the new one, complete. A folder takes two renames to be
    replaced: a kill between them leaves the old one as ``NAME.replaced``, and the next write restores it.
    """
    partial, replaced = (path.with_name(path.name + ending) for ending in (PARTIAL, REPLACED))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _restore(path, replaced)
        partial.mkdir(parents=True)
        yield partial
        if path.exists():
            path.replace(replaced)
        partial.replace(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _restore(path, replaced)


def _restore(path: Path, replaced: Path) -> None:
    """Remove a replaced folder, or rename it back if no other took its place."""
    if replaced.exists():
        if path.exists():
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
    probe = path.with_name(f"{path.name}.mode")
    probe.unlink(missing_ok=True)
    try:
        probe.touch()
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
    finally:
        probe.unlink(missing_ok=True)


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
    """Raise unless the folder does not exist yet or is empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder: choose another one")
