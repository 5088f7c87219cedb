"""Duration of past compilations, in a small file of the user's cache folder."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from driftgen.support.atomic_write import atomic_write
from driftgen.support.untrusted_files import read_bytes

__all__ = ["last_compile_seconds", "record_compile_seconds"]

FILE = "compile_times.json"
MAX_ENTRIES = 200  # the oldest ones are dropped


def last_compile_seconds(key: str) -> float | None:
    """Return how long the last compilation of this key took; None if there was none."""
    seconds = _read().get(key)
    return float(seconds) if isinstance(seconds, int | float) else None


def record_compile_seconds(key: str, seconds: float) -> None:
    """Remember the duration of a compilation. A cache that cannot be written is no error."""
    entries = {**{k: v for k, v in _read().items() if k != key}, key: round(seconds, 1)}
    with suppress(OSError, RuntimeError):
        path = _path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as scratch:
            kept = dict(list(entries.items())[-MAX_ENTRIES:])
            scratch.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def _path() -> Path:
    # Path.home() raises RuntimeError for a user without a home folder.
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "driftgen" / FILE


def _read() -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):  # RecursionError is a RuntimeError
        entries = json.loads(read_bytes(_path()))
        if isinstance(entries, dict):
            return entries
    return {}
