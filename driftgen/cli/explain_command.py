"""The ``explain`` command."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["explain"]


def explain(
    topic: Annotated[
        str | None, typer.Argument(help="Topic that a message names. Default: list all.", show_default=False)
    ] = None,
) -> None:
    """Explain a warning or an error: what it means and what to do."""
    from rich.console import Console
    from rich.markdown import Markdown

    from driftgen.support.troubleshooting import find_section, first_sentence, topics

    if topic is None:
        width = max(map(len, topics())) + 2
        for name in topics():
            print(f"{name:<{width}}{first_sentence(name)}")
    else:
        Console(highlight=False).print(Markdown(find_section(topic), hyperlinks=False))
