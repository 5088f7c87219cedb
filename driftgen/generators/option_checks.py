"""Checks of single options, shared by the configurations of generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from driftgen.errors import InputError
from driftgen.support.checked_arguments import show_value

__all__ = ["MOST_LAYERS", "check_sizes", "check_types"]

MOST, MOST_LAYERS = 2**31 - 1, 10_000
LAYERS = ("depth", "blocks", "style_codebooks")  # each is a module or more

# The types of options: what is accepted, and how a message calls it.
_WORDS: dict[Any, str] = {
    int: "a whole number",
    int | None: "a whole number, or null",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[int, ...]: "a list of whole numbers",
}


def check_types(config: Any) -> None:
    """Raise InputError unless every field of the dataclass has its declared type."""
    hints = get_type_hints(type(config))
    for field in fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if not _fits(value, hint):
            example = list(field.default) if isinstance(field.default, tuple) else field.default
            raise InputError(f"{field.name}={show_value(value)} must be {_WORDS[hint]}, such as {example}")


def check_sizes(config: Any, least: Mapping[str, int]) -> None:
    """Raise InputError for a whole number below 1, or below ``least`` for the options named in it, and for
    one that no network has.
    """
    for field in fields(config):
        value, bound = getattr(config, field.name), least.get(field.name, 1)
        numbers = value if isinstance(value, tuple) else (value,)
        if any(_fits(n, int) and n < bound for n in numbers):
            raise InputError(f"{field.name}={value} is too small: it must be at least {bound}")
        most = MOST_LAYERS if field.name in LAYERS else MOST
        if any(isinstance(n, int | float) and not -most <= n <= most for n in numbers):
            raise InputError(f"{field.name}={value} is too large: it must be at most {most:,}")


def _fits(value: Any, hint: Any) -> bool:
    if hint == tuple[int, ...]:
        return (
            isinstance(value, Sequence) and not isinstance(value, str) and all(_fits(n, int) for n in value)
        )
    if hint == int | None:
        return value is None or _fits(value, int)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
