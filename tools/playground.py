"""Write the playground as one file from its sources: ``make playground``.

Browsers refuse to import modules from ``file://``, so the page holds all of them in three scripts. Imports
and ``export`` are removed, and the modules of a script share its scope.
"""

from __future__ import annotations

import re
from pathlib import Path

from driftgen.errors import InputError
from driftgen.studio.playground_page import PLAYGROUND
from driftgen.support.atomic_write import atomic_write

__all__ = ["SCRIPTS", "build", "main"]

SOURCES = PLAYGROUND.parent
BASE_STYLE = SOURCES.parent / "base.css"
# Each script of the template, with its modules in an order in which each follows what it imports.
SCRIPTS = {
    "engine": ("field", "toys", "mlp", "engine"),
    "worker": ("worker",),
    "page": ("settings", "drawing", "tour", "pens", "controls", "page"),
}
NOTICE = "<!-- Written by `make playground` from the files beside it. Edit those. -->\n"

IMPORT = re.compile(r'^import \{[^}]*\} from "\./(\w+)\.mjs";\n', re.MULTILINE)
NAME = re.compile(r"^(?:async )?(?:function|class|const|let) (\w+)", re.MULTILINE)


def build(sources: Path = SOURCES) -> str:
    """Return the page. Raises ``InputError`` if the modules cannot share a scope."""
    page = (sources / "index.template.html").read_text(encoding="utf-8")
    styles = (BASE_STYLE, sources / "style.css")
    parts = {"style": "\n".join(style.read_text(encoding="utf-8") for style in styles)}
    seen: dict[str, str] = {}
    for script, modules in SCRIPTS.items():
        parts[script] = "\n".join(_module(sources / f"{module}.mjs", seen) for module in modules)
    for name, text in parts.items():
        # Not a template language: the sources may hold braces and backslashes.
        before, marker, after = page.partition("{{" + name + "}}")
        if not marker:
            raise InputError(f"index.template.html has no place for {name}: add {{{{{name}}}}}")
        page = before + text.strip("\n") + after
    return page.replace("<html", NOTICE + "<html", 1)


def _module(path: Path, seen: dict[str, str]) -> str:
    """Return a module without imports and exports, and note its names in ``seen``."""
    text = path.read_text(encoding="utf-8")
    for imported in IMPORT.findall(text):
        if imported not in seen.values():
            raise InputError(f"{path.name} imports {imported}, which does not precede it in SCRIPTS")
    text = re.sub(r"^export ", "", IMPORT.sub("", text), flags=re.MULTILINE)
    if "</script" in text or re.search(r"^import\b", text, re.MULTILINE):
        raise InputError(f"{path.name} holds an import that cannot be removed, or ends its own script")
    for name in NAME.findall(text):
        if name in seen:
            raise InputError(f"{name} stands in {seen[name]}.mjs and in {path.name}: rename one")
        seen[name] = path.stem
    return f"// ---- {path.name} ----\n{text}"


def main() -> None:
    """Write the page beside its sources."""
    with atomic_write(PLAYGROUND) as scratch:
        scratch.write_text(build(), encoding="utf-8")
    print(PLAYGROUND)


if __name__ == "__main__":
    main()
