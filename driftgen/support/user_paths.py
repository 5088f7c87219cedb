"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path

from driftgen.errors import InputError

__all__ = ["expand_user"]


def expand_user(text: str | Path) -> Path:
    """Return the path with ``~`` or ``~name`` replaced by the home folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InputError(f"{text}: there is no home folder of this user; write the path without ~") from None
