"""Atomic writes, and checked output folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgen.errors import InputError

__all__ = ["atomic_write", "make_folder"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` on success and is deleted on failure.

    An interrupted write leaves the old file or the new one, never a partial file.
    """
    scratch = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


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
