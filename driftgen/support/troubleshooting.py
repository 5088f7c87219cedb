"""Sections of the troubleshooting page, which health warnings and common errors name."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

from driftgen.errors import unknown_name

__all__ = ["TOPIC", "find_section", "first_sentence", "paragraphs", "read_page", "topics"]

TOPIC = re.compile(r" \(driftgen explain ([a-z-]+)\)$")  # at the end of a message


def read_page() -> str:
    """Return the page as Markdown: one heading of level 2 for each topic."""
    return (files("driftgen.support") / "troubleshooting.md").read_text(encoding="utf-8")


def topics() -> list[str]:
    """Return the topics in the order of the page. A topic is the anchor of its heading."""
    return list(_sections())


def find_section(topic: str) -> str:
    """Return the section of a topic as Markdown."""
    if topic not in _sections():
        raise unknown_name("topic", topic, topics())
    return _sections()[topic]


def paragraphs(topic: str) -> tuple[str, ...]:
    """Return a section as paragraphs of plain text, without its heading and the text of its message."""
    text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", find_section(topic).replace("`", ""))
    blocks = re.split(r"\n\n|\n(?=\d\. )", text)
    return tuple(" ".join(block.split()) for block in blocks[2:])


def first_sentence(topic: str) -> str:
    """Return the first sentence of a section, as plain text."""
    text = re.sub(r"^\d\. ", "", paragraphs(topic)[0])  # a section may begin with its list of steps
    return re.split(r"\. (?=[A-Z])", text, maxsplit=1)[0].rstrip(".") + "."


@cache
def _sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)\n", read_page(), flags=re.MULTILINE)[1:]
    return {
        title.strip().lower().replace(" ", "-"): f"## {title}\n{text}".strip()
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
