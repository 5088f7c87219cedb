"""Files are written whole or not at all, into folders that can be written to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from driftgen.errors import InputError

__all__ = ["atomic_write", "make_folder"]


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes its place when all went well and vanishes when not.

    So a run that is stopped leaves the old file or the new one, never half of one.
    """
    scratch = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """The folder, made if need be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot write to {path}: {error.strerror}; choose another folder with --out"
        ) from None
    if not os.access(path, os.W_OK):
        raise InputError(f"cannot write to {path}: no permission; choose another folder with --out")
    return path
