"""Options of a class or function: names, types, defaults, and the meanings that its docstring gives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

__all__ = ["Option", "as_recipe_value", "describe_options", "documented_arguments"]

_HEADING = re.compile(r"(Args|Arguments|Attributes|Parameters):")
_ENTRY = re.compile(r"(\w+): +(.*)")


class Option(NamedTuple):
    """One option; all values are text as a recipe writes it."""

    name: str
    type: str
    default: str
    meaning: str


def describe_options(target: Callable[..., Any], skip: Sequence[str] = ()) -> list[Option]:
    """Return the options of a class or function.

    The options of a class whose attribute ``config`` is a dataclass are the fields of that dataclass, as in
    the generators of this package. ``skip`` names arguments to leave out.
    """
    config = _hints(target).get("config") if isinstance(target, type) else None
    if isinstance(config, type) and is_dataclass(config):
        hints, meanings = _hints(config), documented_arguments(config.__doc__)
        defaults = {f.name: f.default for f in fields(config)}
        return [_option(name, hints, defaults[name], MISSING, meanings) for name in defaults]
    meanings = documented_arguments(target.__doc__)
    hints = _hints(vars(target).get("__init__") if isinstance(target, type) else target)
    collecting = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [
        _option(name, hints, parameter.default, parameter.empty, meanings)
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in ("self", *skip) and parameter.kind not in collecting
    ]


def documented_arguments(doc: str | None) -> dict[str, str]:
    """Return the meaning of each argument or attribute of a docstring in Google's style, on one line."""
    meanings: dict[str, str] = {}
    section = indent = None
    name = ""
    for line in inspect.cleandoc(doc or "").splitlines():
        depth = len(line) - len(line.lstrip())
        if not line.strip():
            continue
        if depth == 0:
            section, indent = _HEADING.fullmatch(line), None
        elif section:
            indent = depth if indent is None else indent
            entry = _ENTRY.fullmatch(line.strip()) if depth == indent else None
            if entry:
                name = entry[1]
                meanings[name] = entry[2]
            elif name:
                meanings[name] += " " + line.strip()
    return {name: _plain(text) for name, text in meanings.items()}


def as_recipe_value(value: Any) -> str:
    """Return a value as a recipe writes it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(as_recipe_value, value))}]" if isinstance(value, list | tuple) else str(value)


def _option(
    name: str, hints: dict[str, Any], default: Any, required: Any, meanings: dict[str, str]
) -> Option:
    text = "required" if default is required else as_recipe_value(default)
    return Option(name, _type_text(hints.get(name, Any)), text, meanings.get(name, ""))


def _hints(target: Any) -> dict[str, Any]:
    try:
        return get_type_hints(target)
    except (NameError, TypeError):  # a name that is imported for type checkers alone
        return dict(getattr(target, "__annotations__", {}))


def _type_text(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_type_text(a) for a in arguments)
    if origin in (tuple, list, Sequence) and arguments:
        return f"list of {_type_text(arguments[0])}"
    if hint is NoneType:
        return "null"
    return hint.__name__ if isinstance(hint, type) else str(hint).removeprefix("typing.")


def _plain(text: str) -> str:
    """Remove reStructuredText: ``name`` and :class:`name`."""
    text = re.sub(r":\w+:`~?([^`]*)`", lambda match: match[1].rpartition(".")[2], text)
    return text.replace("``", "")
