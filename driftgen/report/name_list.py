"""Names with their descriptions, wrapped to the width of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

__all__ = ["show_names"]

LEAST = 20  # narrowest column of descriptions; below it a description follows its name on lines of its own


def show_names(sections: Mapping[str, Mapping[str, str]], console: Console) -> None:
    """Print each section: a title, then one row per name, whose description wraps in its column."""
    width = max((len(name) for names in sections.values() for name in names), default=0)
    column = 2 + width + 2
    beside = console.width - column >= LEAST
    indent = column if beside else 4
    for title, names in sections.items():
        console.print(Text(title, "dim"))
        for name, description in names.items():
            lines = textwrap.wrap(description, max(console.width - indent, 1), break_on_hyphens=False)
            first = lines.pop(0) if beside and lines else ""
            console.print(
                Text("  ").append(name, "bold").append(f"{'':{width - len(name) + 2}}{first}".rstrip())
            )
            for line in lines:
                console.print(Text(" " * indent + line))
