"""Exceptions for input that the user can correct."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

__all__ = ["InputError", "NotFiniteError", "OptionError", "explained", "unknown_name"]

LONGEST, END = 1400, 300  # characters of a message, and of its end if the middle is left out
LONGEST_NAME = 100  # characters of an unknown name in a message


class InputError(ValueError):
    """Wrong input: one line with the argument, its value and what to do.

    Attributes:
        topic: section of the troubleshooting page, or None. The command and tracebacks name it.
    """

    def __init__(self, message: object = "", topic: str | None = None) -> None:
        # Values and file names in a message may hold line breaks, and be as long as the file they are from.
        text = " ".join(str(message).splitlines())
        super().__init__(text if len(text) <= LONGEST else f"{text[: LONGEST - END]} ... {text[-END:]}")
        self.topic = topic
        if topic is not None:
            self.add_note(f"driftgen explain {topic}")


def explained(message: str, topic: str | None) -> str:
    """Return a message with the command that prints a section of the troubleshooting page."""
    return message if topic is None else f"{message} (driftgen explain {topic})"


class OptionError(InputError):
    """Options that do not fit together, and values of the others that do.

    Attributes:
        problem: the options and their values.
        suggested: options to change, and the values that fit.
    """

    def __init__(self, problem: str, suggested: Mapping[str, Any], prefix: str = "") -> None:
        self.problem, self.suggested = problem, dict(suggested)
        changes = [f"{prefix}{name}={_compact(value)}" for name, value in suggested.items()]
        super().__init__(f"{problem}: set {' and '.join(changes)}")

    def within(self, section: str) -> OptionError:
        """Return the error with full names of the options, for a section of a recipe."""
        return OptionError(self.problem, self.suggested, f"{section}.")


def _compact(value: Any) -> str:
    """Return a value as one word of a command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


class NotFiniteError(InputError):
    """NaN or infinite samples or features. Training skips the step."""


def unknown_name(argument: str, name: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with the closest known name as a suggestion."""
    names, shown = sorted(known), repr(name)
    shown = shown if len(shown) <= LONGEST_NAME else f"{shown[:LONGEST_NAME]} ..."
    near = get_close_matches(str(name)[:LONGEST_NAME], names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return InputError(
        f"{argument}={shown} is not known: {hint}choose from {', '.join(names)}", topic="unknown-name"
    )
