"""Commands whose help is in plain words: ``--compile`` instead of ``--compile <bool>``, ``<path>`` instead of
``<list[Path]>``, ``MODEL...`` instead of ``{model}...``."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["App"]

LIST = re.compile(r"list\[(.+?)\]")


class App(typer.Typer):
    """``typer.Typer`` with such commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, **{"cls": Command, **options})


class Command(TyperCommand):
    """A command; ``get_params`` also lists the option ``--help``, which belongs to no function."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidy(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _tidy(super().get_params(ctx))


def _tidy(parameters: list[Any]) -> list[Any]:
    """Show flags without a type, lists by the type of an entry, and arguments by a name in capitals."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif "display_type" not in vars(parameter):  # a second call would wrap the first one
            if hasattr(parameter, "display_type"):
                parameter.display_type = partial(_entry_type, parameter.display_type)
            if parameter.param_type_name == "argument":
                _name_argument(parameter)
    return parameters


def _entry_type(show: Callable[..., str], ctx: Any) -> str:
    """Return ``<path>`` for ``<list[Path]>``."""
    return LIST.sub(r"\1", show(ctx)).replace("<Path>", "<path>")


def _name_argument(parameter: Any) -> None:
    name = parameter.metavar or parameter.name.upper()
    if parameter.nargs == -1 and " " not in name:
        name = name.removesuffix("...") + "..."
    parameter.metavar = name
    parameter.get_usage_pieces = lambda ctx: [name if parameter.required else f"[{name}]"]
