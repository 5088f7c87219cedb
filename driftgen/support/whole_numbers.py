"""Checks of whole numbers, without torch: simulator processes start faster."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from driftgen.errors import InputError

__all__ = ["check_count", "check_seed"]

MOST_BITS = 63


def check_count(argument: str, value: Any, least: int = 1, most: int | None = None) -> None:
    """Raise ``InputError`` unless a value is an integer from ``least`` to ``most``, or to 2^31 - 1."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= int(value) <= (2**31 - 1 if most is None else most):
        bounds = f"from {least} to {most:,}" if most else f"at least {least}, a whole number below 2^31"
        raise InputError(f"{argument}={str(value)[:80]} must be {bounds}")


def check_seed(argument: str, seed: Any) -> None:
    """Raise ``InputError`` unless a seed is None or an integer from 0 to 2^63 - 1."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**MOST_BITS:
        raise InputError(f"{argument}={seed!r} must be an integer from 0 to 2^63 - 1")
