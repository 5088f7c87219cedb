"""Names with their descriptions, and options of networks, wrapped to the width of the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from driftgen.training.recipe_options import OptionSection

__all__ = ["show_names", "show_options"]

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


def show_options(sections: Sequence[OptionSection], console: Console) -> None:
    """Print the options of each network: name, type and default, then the meaning."""
    for section in sections:
        console.print(Text(section.key, "bold").append(f"  {section.about}", "dim not bold"))
        for option in section.options:
            head = textwrap.wrap(f"{option.name} ({option.type}): {option.default}", console.width - 6)
            meaning = option.meaning[:1].upper() + option.meaning[1:]
            for i, line in enumerate(head):
                console.print(Text("  " if i == 0 else "      ").append(line, "cyan"))
            for line in textwrap.wrap(meaning, console.width - 6, break_on_hyphens=False):
                console.print(Text("      " + line))
    if sections:
        key, option = sections[0].key, sections[0].options[0]
        example = next((o for o in sections[0].options if o.default != "from the data"), option)
        console.print(Text(f"To change one: --set {key}.{example.name}=VALUE", "dim"))
