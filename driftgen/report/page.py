"""HTML pages from templates. Jinja2 escapes every value here, and nowhere else.

A page loads nothing from elsewhere.
"""

from __future__ import annotations

import functools
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import driftgen
from driftgen.support.atomic_write import atomic_write

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["render", "scoped_style", "write_page"]


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template of ``report/templates`` with plain text values and write the page; return its path.

    Values are escaped, whatever file they come from. Only style sheet and script, which are files of this
    package, are inserted as they are.
    """
    with atomic_write(path) as scratch:
        scratch.write_bytes(render(template, **values).encode("utf-8"))
    return path


def render(template: str, **values: Any) -> str:
    """Return a template of ``report/templates`` with plain text values, which are escaped."""
    text = _environment().get_template(template).render(version=driftgen.__version__, **values)
    # A lone surrogate, as JSON may hold, has no UTF-8 form.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def scoped_style(selector: str) -> str:
    """Return the style sheet of the pages for one element of another page, by nesting."""
    style = (files("driftgen.report") / "templates" / "style.css").read_text(encoding="utf-8")
    for page in (":root", "html", "body"):
        style = re.sub(rf"(?m)^(\s*){page} \{{", r"\1& {", style)
    return f"{selector} {{\n{style}\n}}\n"


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("driftgen.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files("driftgen.report") / "templates"
    for name in ("style.css", "script.js"):
        made.globals[name.replace(".", "_")] = Markup(folder.joinpath(name).read_text(encoding="utf-8"))
    return made
