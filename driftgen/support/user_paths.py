"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path

from driftgen.errors import InputError

__all__ = ["cache_folder", "expand_user"]


def expand_user(text: str | Path) -> Path:
    """Return the path with ``~`` or ``~name`` replaced by the home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(f"{text}: there is no home folder of this user; write the path without ~") from None


def cache_folder() -> Path:
    """Return the folder for downloaded files of this user; it may not exist yet."""
    return expand_user(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "driftgen"
