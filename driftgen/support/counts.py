"""Counts within bounds: a number that no run reaches is an error, not a wait without end."""

from __future__ import annotations

from driftgen.errors import InputError

__all__ = ["check_count"]


def check_count(name: str, value: int, most: int, least: int = 1) -> None:
    """Raise unless a count is from ``least`` to ``most``."""
    if not least <= value <= most:
        raise InputError(f"{name}={value} must be from {least} to {most:,}")
