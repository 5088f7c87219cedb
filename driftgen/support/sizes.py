"""Sizes of files as people write them."""

from __future__ import annotations

import re

from driftgen.errors import InputError

__all__ = ["parse_size", "show_size"]

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str | int, name: str = "size") -> int:
    """Return a number of bytes: ``"60MB"`` is 60,000,000, ``"64MiB"`` is 67,108,864."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(text))
    unit = UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if size < 1:
        raise InputError(f"{name}={text}: write a number of bytes, or text such as 60MB or 64MiB")
    return size


def show_size(size: int) -> str:
    """Return a size in megabytes, in kilobytes below one megabyte, or in gigabytes from ten on."""
    if size >= 10**10:
        return f"{size / 10**9:,.1f} GB"
    return f"{size / 10**6:,.1f} MB" if size >= 10**6 else f"{size / 10**3:,.1f} kB"
