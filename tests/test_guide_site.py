"""The guide builds as a site: links within the repository, docstrings, and nothing from elsewhere."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml

import driftgen
from tools import guide_site
from tools.chromium import chromium_path, open_chromium
from tools.guide_site import ROOT, missing_docstrings, on_page_content, on_page_markdown, site_path


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("docs/training.md", "training.md"),
        ("README.md", "index.md"),
        ("CONTRIBUTING.md", "CONTRIBUTING.md"),
        ("results/README.md", "results/README.md"),
        ("results/evaluator", "results/evaluator/README.md"),
        ("results/demo-digits", "source/results/demo-digits/index.md"),
        ("results/demo-digits/samples.png", "results/demo-digits/samples.png"),
        ("driftgen/drift/field.py", "source/driftgen/drift/field.py.md"),
        ("driftgen/studio/playground/playground.html", "driftgen/studio/playground/playground.html"),
        ("../elsewhere.md", None),
    ],
)
def test_places_of_the_site(target, place):
    assert site_path(target) == place


def test_links_are_moved_outside_code_only():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/README.md"))
    text = '[a](../docs/training.md#data) [b](https://x.org) <img src="demo-digits/samples.png">\n'
    text += "```md\n[a](../docs/training.md)\n```\n"
    moved = on_page_markdown(text, page, None, None)
    assert moved.startswith('[a](../training.md#data) [b](https://x.org) <img src="demo-digits/samples.png">')
    assert "[a](../docs/training.md)\n" in moved


def test_docstrings_become_markdown():
    html = "<p>Example::</p><p>See :func:<code>~driftgen.train</code>.</p>"
    assert on_page_content(html, None, None, None) == "<p>Example:</p><p>See <code>train</code>.</p>"


def test_a_missing_docstring_is_found(monkeypatch):
    assert missing_docstrings(["driftgen.train", "driftgen.DriftingLoss"]) == []
    monkeypatch.setattr(driftgen.DriftingLoss, "forward", lambda self: None)
    monkeypatch.setattr(driftgen.train, "__doc__", None)
    found = missing_docstrings(["driftgen.train", "driftgen.DriftingLoss"])
    assert found == ["driftgen.train", "driftgen.DriftingLoss.forward"]


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    named = set(re.findall(r"^::: driftgen\.(\w+)", page, re.MULTILINE))
    assert set(driftgen.__all__) - named <= {"guidance"}  # under drift.guidance
    assert "::: driftgen.drift.guidance.sample_alpha" in page


def test_every_page_is_in_the_navigation_and_in_the_index():
    settings = (ROOT / "mkdocs.yml").read_text()
    index = (ROOT / "docs" / "index.md").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert re.search(rf": {path.name}$", settings, re.MULTILINE), path.name
        assert path.name == "index.md" or f"]({path.name})" in index, path.name


def test_files_for_hosts_are_valid():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == driftgen.__version__
    for path in (ROOT / ".github").rglob("*.yml"):
        assert isinstance(yaml.safe_load(path.read_text()), dict), path
    for path in re.findall(r"^COPY (.+) \S+$", (ROOT / "Containerfile").read_text(), re.MULTILINE):
        assert all((ROOT / name).exists() for name in path.split())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 100
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r'<(?:script|img|iframe|source)[^>]* src="?https?:', text), page
        assert not re.search(r'<link[^>]* href="?https?:', text), page
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}
    assert {"troubleshooting.html#collapse", "api.html#driftgen.DriftingLoss"} <= places
    assert not any(place.startswith("source/") for place in places)


def eaten_formulas(html):
    """Tags of a formula taken for Markdown: with attributes nobody wrote, or with a formula in italics."""
    attributes = r'(?: (?:class|id|role|hidden|style|data-md-[a-z]+|aria-[a-z]+)(?:=(?:"[^"]*"|[^\s>]+))?)*'
    text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", html, flags=re.DOTALL)
    tags = re.findall(r"<(?:em|strong|p|li|td|h[1-6])\b[^>]*>", text)
    odd = [tag for tag in tags if not re.fullmatch(rf"<\w+{attributes}\s*/?>", tag)]
    return odd + re.findall(r"<em>[^<]*[=_√ΣφτλṼ][^<]*</em>", text)


def test_a_formula_taken_for_markdown_is_found():
    assert eaten_formulas(
        '<p>MSE(φ̃<em j_τ>j(x) + Σ_τ Ṽ</em>)</p><p class="x" id=y hidden>a <em>b</em></p>'
    ) == ["<em j_τ>"]
    assert eaten_formulas("<em>j = φ_j</em> <code><em>a_b</em></code>") == ["<em>j = φ_j</em>"]


@pytest.mark.slow
def test_formulas_are_no_markdown(site):
    for page in site.rglob("*.html"):
        assert not eaten_formulas(page.read_text(encoding="utf-8")), page


@pytest.mark.slow
@pytest.mark.skipif(chromium_path() is None, reason="no Chromium")
def test_search_in_pages_opened_as_files(site):
    remote, errors = [], []
    with open_chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or remote.append(r.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in ("index", "start", "api", "commands", "results/index"):
            page.goto(f"file://{site}/{name}.html")
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.set_viewport_size({"width": 1300, "height": 900})
        page.click(".md-search__input")
        page.keyboard.type("collapse")
        page.wait_for_selector(".md-search-result__item", timeout=30_000)
        assert "Troubleshooting" in page.inner_text(".md-search-result__list")
    assert not remote
    assert not errors


def test_the_hooks_are_those_of_the_settings():
    assert "mkdocs build --strict\n" in (ROOT / "Makefile").read_text()  # not quiet: warnings must count
    assert "hooks: [tools/guide_site.py]" in (ROOT / "mkdocs.yml").read_text()
    assert {"on_files", "on_page_markdown", "on_page_content"} <= set(guide_site.__all__)
