"""Exceptions for input that the user can correct."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["InputError", "NotFiniteError", "unknown_name"]


class InputError(ValueError):
    """Wrong input: one line with the argument, its value and what to do."""


class NotFiniteError(InputError):
    """NaN or infinite samples or features. Training skips the step."""


def unknown_name(argument: str, name: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with the closest known name as a suggestion."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"{argument}={name!r} is not known: {hint}choose from {', '.join(names)}")
