"""Hooks of mkdocs that make the guide one site from the whole repository: ``make docs``.

Pages link to files as they lie in the repository, so that the same links work on a code host. Here, pages of
results/ and of the root join those of docs/, a link to a source file leads to a page that shows the file, and
pictures are copied. The site loads nothing from elsewhere. A public name without a docstring is a warning,
and with ``--strict`` each warning ends the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

__all__ = ["on_files", "on_page_content", "on_page_markdown"]

ROOT = Path(__file__).parents[1]
LOG = logging.getLogger("mkdocs.hooks.guide")
DOCS, SOURCE = "docs/", "source/"
ROOT_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PLAIN = {".png", ".gif", ".svg", ".jpg", ".html"}  # copied; other files are shown on a page
LANGUAGES = {".py": "python", ".mjs": "javascript", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
LONGEST = 200_000  # characters of a file that is shown whole
LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s]+)(?P<after>\))")
SRC = re.compile(r'(?P<before>(?:src|href)=")(?P<target>[^"]+)(?P<after>")')
FENCE = re.compile(r"^(```+).*?^\1 *$", re.DOTALL | re.MULTILINE)


def repository_pages() -> dict[str, str]:
    """Return the path in the repository of each page of the site, by its path in the site."""
    pages = {path.name: path for path in (ROOT / "docs").glob("*.md")}
    pages |= {name: ROOT / name for name in ROOT_PAGES}
    pages |= {str(path.relative_to(ROOT)): path for path in (ROOT / "results").rglob("*.md")}
    return {place: path.relative_to(ROOT).as_posix() for place, path in pages.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of results/ and of the root, and every file that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    def add(place: str, **content: Any) -> None:
        inclusion = InclusionLevel.NOT_IN_NAV if place not in named else InclusionLevel.UNDEFINED
        files.append(File.generated(config, place, inclusion=inclusion, **content))

    named = set(_leaves(config.nav))
    pages = repository_pages()
    for place, path in pages.items():
        if not path.startswith(DOCS):
            add(place, abs_src_path=str(ROOT / path))
    linked = {target for page in pages.values() for target, _ in _links(page)}
    for target in sorted(linked | _folders_of(linked)):
        found = site_path(target)
        if found is None or found in pages or not (ROOT / target).exists():
            continue
        if found.startswith(SOURCE):
            add(found, content=_shown(target))
        elif (ROOT / target).is_file() and not target.startswith(DOCS):
            add(found, abs_src_path=str(ROOT / target))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links within the repository into links within the site."""
    place = page.file.src_uri
    path = repository_pages().get(place)
    if path is None:
        return markdown
    if place == "api.md":
        for name in missing_docstrings(re.findall(r"^::: (\S+)$", markdown, re.MULTILINE)):
            LOG.warning("api.md: %s has no docstring", name)

    def moved(link: re.Match[str]) -> str:
        target, _, heading = link["target"].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return link[0]
        found = site_path(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
        if found is None:
            return link[0]
        new = posixpath.relpath(found, posixpath.dirname(place) or ".")
        return f"{link['before']}{new}{'#' + heading if heading else ''}{link['after']}"

    def outside_code(text: str) -> str:
        return SRC.sub(moved, LINK.sub(moved, text))

    done, parts = 0, []
    for block in FENCE.finditer(markdown):
        parts += [outside_code(markdown[done : block.start()]), block[0]]
        done = block.end()
    return "".join([*parts, outside_code(markdown[done:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the roles of docstrings, which Markdown does not know, into plain code."""
    html = re.sub(
        r":(?:func|class|meth|mod|attr|data|exc):<code>~?(?:driftgen\.)?([^<]*)</code>",
        r"<code>\1</code>",
        html,
    )
    return re.sub(r"(<p>[^<]{0,80})::</p>", r"\1:</p>", html)


def site_path(target: str) -> str | None:
    """Return the path in the site of a path in the repository, or None if it lies outside."""
    if target.startswith("..") or target.startswith("/"):
        return None
    if target == "README.md":
        return "index.md"
    if target.startswith(DOCS):
        return target.removeprefix(DOCS)
    if target in ROOT_PAGES:
        return target
    path = ROOT / target
    if path.is_dir():
        page = f"{target}/README.md"
        return (
            page if target.startswith("results") and (ROOT / page).is_file() else f"{SOURCE}{target}/index.md"
        )
    if path.suffix in PLAIN or (path.suffix == ".md" and target.startswith("results/")):
        return target
    return f"{SOURCE}{target}.md"


def missing_docstrings(names: list[str]) -> list[str]:
    """Return the public names among these objects and their members that have no docstring."""
    import inspect
    from importlib import import_module

    missing = []
    for name in names:
        module, _, last = name.rpartition(".")
        found = getattr(import_module(module), last)
        members = {name: found}
        if inspect.isclass(found) or inspect.ismodule(found):
            public = getattr(found, "__all__", None) or [n for n in vars(found) if not n.startswith("_")]
            members |= {f"{name}.{n}": inspect.getattr_static(found, n, None) for n in public}
        for member, value in members.items():
            value = getattr(value, "__func__", value)  # of a class method
            described = inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property)
            if (described or value is found) and not inspect.getdoc(value):
                missing.append(member)
    return missing


def _leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict | list):
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from _leaves(entry)


@cache
def _links(page: str) -> tuple[tuple[str, str], ...]:
    """Return the relative links of a page as (path in the repository, heading)."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    found = []
    for match in [*LINK.finditer(text), *SRC.finditer(text)]:
        target, _, heading = match["target"].partition("#")
        if target and not re.match(r"[a-z]+:", target):
            found.append((posixpath.normpath(posixpath.join(posixpath.dirname(page), target)), heading))
    return tuple(found)


def _folders_of(targets: set[str]) -> set[str]:
    """Return the files of the linked folders that have no page of their own."""
    folders = [t for t in targets if (ROOT / t).is_dir() and (site_path(t) or "").startswith(SOURCE)]
    return {str(path.relative_to(ROOT)) for t in folders for path in _listed(ROOT / t) if path.is_file()}


def _listed(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if not p.name.startswith((".", "__pycache__")))


def _shown(target: str) -> str:
    """Return a page with a folder's list or a file's text, which search leaves out."""
    path, head = ROOT / target, "---\nsearch:\n  exclude: true\nhide: [toc]\n---\n"
    if path.is_dir():
        rows = []
        for entry in _listed(path):
            place = site_path(entry.relative_to(ROOT).as_posix())
            if entry.is_dir():
                rows.append(f"- {entry.name}/")
            else:
                link = posixpath.relpath(place or "", f"{SOURCE}{target}")
                rows.append(f"- [{entry.name}]({link})")
        return f"{head}# {target}/\n\n" + "\n".join(rows) + "\n"
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return f"{head}# {target}\n\nBinary, {path.stat().st_size:,} bytes.\n"
    note = "" if len(text) <= LONGEST else f"\nThe first {LONGEST:,} characters.\n"
    fence = "`" * 4
    return (
        f"{head}# {target}\n{note}\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text[:LONGEST]}\n{fence}\n"
    )
