"""Parts of the guide that come from the code: the commands, the troubleshooting page, pictures of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from driftgen.support.troubleshooting import TOPIC, read_page
from tools.records import Results, markdown

__all__ = ["commands", "health", "troubleshooting"]

MARKUP = re.compile(r"\[/?[a-z ]+\]")  # of rich, in help texts


def troubleshooting(results: Results) -> str:
    """Return the sections of the troubleshooting page, which the package carries."""
    return read_page()


def health(results: Results) -> str:
    """Return each run of results/health with its picture and its warnings."""
    parts = []
    for name, row in results.load("health/health.json")["rows"].items():
        title = row["title"][:1].upper() + row["title"][1:]
        lines = [f"### {title}", f'<img src="../results/health/{name}.png" alt="{title}">']
        last = row["last"]
        lines.append(f"Last step: spread {last['spread']:.2g}, diversity {last['diversity']:.2g}.")
        told: dict[str, str] = {}
        for warning in row["warnings"]:
            kind = TOPIC.search(warning["text"])
            text = TOPIC.sub("", warning["text"])
            if kind is not None and kind[1] not in told:
                told[kind[1]] = (
                    f"- From step {warning['step']:,}: {text}. [More](troubleshooting.md#{kind[1]})"
                )
        lines.append("\n".join(told.values()) or "No warning.")
        parts.append("\n\n".join(lines))
    return "\n\n".join(parts)


def commands(results: Results) -> str:
    """Return every command with its arguments and options, from typer's own description."""
    import typer.main

    from driftgen.cli import app

    return "\n\n".join(_sections(typer.main.get_command(app), ("driftgen",)))


def _sections(command: Any, words: tuple[str, ...]) -> Iterator[str]:
    if hasattr(command, "commands"):
        if len(words) > 1:
            yield f"## {' '.join(words)}\n\n{_text(command.help)}"
        for name, inner in command.commands.items():
            yield from _sections(inner, (*words, name))
        return
    level = "##" if len(words) == 2 else "###"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([*words, *(_argument(p) for p in arguments), "[OPTIONS]"])
    parts = [f"{level} {' '.join(words)}", _text(command.help), f"```text\n{usage}\n```"]
    rows = [(f"`{_argument(p)}`", _text(p.help), "") for p in arguments]
    rows += [
        (", ".join(f"`{name}`" for name in (*p.opts, *p.secondary_opts)), _text(p.help), _default(p))
        for p in command.params
        if p.param_type_name == "option"
    ]
    if rows:
        parts.append(markdown(("option", "meaning", "default"), rows))
    yield "\n\n".join(parts)


def _argument(parameter: Any) -> str:
    name = (parameter.metavar or parameter.name or "").upper().strip("[]<>.").replace(" | ", " or ")
    name = f"{name}..." if parameter.nargs == -1 else name
    return name if parameter.required else f"[{name}]"


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == () or value == [] or callable(value):
        return ""
    values = value if isinstance(value, list | tuple) else [value]
    return ", ".join(f"`{getattr(v, 'value', v)}`" for v in values)


def _text(help_text: str | None) -> str:
    """Return a help text as Markdown: paragraphs on single lines, no markup of rich, no broken table."""
    paragraphs = re.split(r"\n\s*\n", (help_text or "").strip().replace("\f", ""))
    return "\n\n".join(MARKUP.sub("", " ".join(p.split())).replace("|", "/") for p in paragraphs)
