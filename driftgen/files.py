"""Files are written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["written_whole"]


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; it takes its place when all went well and vanishes when not.

    So a run that is stopped leaves the old file or the new one, never half of one.
    """
    scratch = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        yield scratch
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
