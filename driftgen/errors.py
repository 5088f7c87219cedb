"""The one exception for input that a person can correct."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["InputError", "NotFiniteError", "unknown_name"]


class InputError(ValueError):
    """Wrong input: one line that names the argument, says what is wrong and what to do."""


class NotFiniteError(InputError):
    """Samples or features that hold NaN or infinite values: in training, a step to be skipped."""


def unknown_name(argument: str, name: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not among the known ones, with the nearest one first."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(f"{argument}={name!r} is not known: {hint}choose from {', '.join(names)}")
