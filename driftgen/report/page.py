"""A self-contained HTML page with embedded figures and animations; it loads nothing from elsewhere."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from driftgen.support.atomic_write import atomic_write

__all__ = ["Section", "section_html", "write_page"]

STYLE = """
:root { color-scheme: light; --ink: #24292f; --soft: #57606a; --line: #d8dee4;
        --blue: #2f6fb7; --orange: #f0820f; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #fff; line-height: 1.55;
       font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .4rem; padding-top: 1.2rem; border-top: 1px solid var(--line); }
p { max-width: 70ch; margin: .4rem 0 .9rem; }
.blue { color: var(--blue); font-weight: 600; } .orange { color: var(--orange); font-weight: 600; }
img { max-width: 100%; height: auto; display: block; }
figure { margin: 1rem 0; }
.pair { display: grid; grid-template-columns: minmax(0, 3fr) minmax(220px, 2fr); gap: 1.5rem;
        align-items: center; }
@media (max-width: 760px) { .pair { grid-template-columns: 1fr; } }
table { border-collapse: collapse; font-size: .95rem; width: 100%; }
td, th { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left; }
td:last-child { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { background: #f6f8fa; padding: .1rem .35rem; border-radius: 4px; font-size: .9em; }
footer { margin-top: 3rem; color: var(--soft); font-size: .9rem; }
"""


@dataclass
class Section:
    """A section of the page: HTML text, image files, and the rows of a table."""

    title: str
    text: str
    picture: Path
    animation: Path
    rows: dict[str, str] = field(default_factory=dict)
    command: str = ""


def write_page(path: Path, title: str, introduction: str, sections: list[Section], footer: str) -> Path:
    """Write the page with all images embedded. ``introduction`` and texts are HTML, titles are plain text."""
    body = "\n".join(section_html(s) for s in sections)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{STYLE}</style></head>
<body><main><h1>{escape(title)}</h1>
{introduction}
{body}
<footer>{footer}</footer></main></body></html>
"""
    with atomic_write(path) as scratch:
        scratch.write_text(page, encoding="utf-8")
    return path


def section_html(section: Section) -> str:
    """Return a section as HTML."""
    rows = "".join(f"<tr><td>{escape(k)}</td><td>{escape(v)}</td></tr>" for k, v in section.rows.items())
    command = f"<p><code>{escape(section.command)}</code></p>" if section.command else ""
    return f"""<section><h2>{escape(section.title)}</h2>
{section.text}
<figure><img alt="{escape(section.title)}: snapshots" src="{_inline(section.picture)}"></figure>
<div class="pair"><img alt="{escape(section.title)}: animation" src="{_inline(section.animation)}">
<table>{rows}</table></div>
{command}</section>"""


def _inline(path: Path) -> str:
    kind = path.suffix.lstrip(".")
    return f"data:image/{kind};base64," + base64.b64encode(path.read_bytes()).decode()
