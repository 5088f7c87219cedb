"""The playground's file: what its sources give, complete in itself; ``driftgen toy --play``."""

import re
import shutil
import sys
import webbrowser

import pytest

from driftgen.drift.kernels import KERNELS
from driftgen.drift.normalization import NORMALIZATIONS
from driftgen.studio.playground_page import PLAYGROUND
from driftgen.training.toy_study import INITS
from tests.support.helpers import fails
from tools.playground import build

SOURCES = [path for path in PLAYGROUND.parent.iterdir() if path != PLAYGROUND]


def test_the_committed_page_is_what_the_sources_give():
    assert PLAYGROUND.read_text(encoding="utf-8") == build(), "run: make playground"


def test_the_page_needs_nothing_else():
    page = PLAYGROUND.read_text(encoding="utf-8")
    assert not re.findall(r"https?://|<script[^>]*\bsrc|@import|@font-face|\bimport\(|\bfetch\(", page)
    assert set(re.findall(r'\b(?:href|src)="([^"]*)"', page)) == {"data:,"}


def test_sources_are_readable():
    assert {path.suffix for path in SOURCES} == {".mjs", ".css", ".html"}
    assert max(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES) <= 400


def test_the_page_offers_what_the_library_has():
    page = PLAYGROUND.read_text(encoding="utf-8")

    def options(name):
        select = re.search(rf'<select id="{name}".*?</select>', page, re.DOTALL)
        return re.findall(r'value="(\w+)"', select[0])

    assert options("kernel") == list(KERNELS)
    assert options("normalization") == list(NORMALIZATIONS)
    assert re.findall(r'name="start" value="(\w+)"', page) == [*INITS, "hand"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("mlp.mjs", "const KERNELS = 1;\n", "KERNELS stands in field.mjs and in mlp.mjs"),
        (
            "field.mjs",
            'import { x } from "./page.mjs";\n',
            "field.mjs imports page, which does not precede it",
        ),
        ("toys.mjs", "import fs from 'fs';\n", "an import that cannot be removed"),
        ("page.mjs", "// </script>\n", "ends its own script"),
        ("index.template.html", None, "no place for style"),
    ],
)
def test_sources_that_cannot_become_one_file(tmp_path, file, text, message):
    shutil.copytree(PLAYGROUND.parent, tmp_path / "copy")
    path = tmp_path / "copy" / file
    path.write_text("" if text is None else text + path.read_text(encoding="utf-8"), encoding="utf-8")
    fails(lambda: build(tmp_path / "copy"), message)


@pytest.fixture
def opened(monkeypatch):
    """Addresses that a browser was asked to open."""
    urls = []
    monkeypatch.setattr(webbrowser, "open", lambda url: urls.append(url) or True)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return urls


def test_play_opens_the_page(here, opened, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    done = here("toy", "--play")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{PLAYGROUND}\n", "")
    assert opened[0].partition("#")[0] == PLAYGROUND.as_uri()
    here(
        "toy",
        "two-moons",
        "--play",
        "--init",
        "far",
        "--generator",
        "--temperature",
        "0.3",
        "--repulsion",
        "0",
    )
    words = dict(word.split("=") for word in opened[1].partition("#")[2].split("&"))
    assert words == {
        "target": "two-moons", "start": "far", "mover": "generator", "temperature": "0.3", "seed": "0",
        "kernel": "laplace", "normalization": "both", "attraction": "1.0", "repulsion": "0.0",
    }  # fmt: skip


def test_play_without_a_display_prints_where_the_page_is(here, opened):
    done = here("toy", "two-moons", "--play", "--init", "far")
    assert (done.returncode, opened) == (0, [])
    path, message, url = done.stdout.splitlines()
    assert (path, message) == (
        str(PLAYGROUND),
        "No browser was found here. Open the file in one; with these settings:",
    )
    assert url.startswith(f"{PLAYGROUND.as_uri()}#target=two-moons&start=far&")


def test_play_refuses_what_the_page_does_not_have(here, opened):
    done = here("toy", "points.npy", "--play")
    assert done.returncode == 2
    assert "distribution='points.npy' is not known" in done.stderr
    assert here("toy", "bimodal", "--play", "--kernel", "x").returncode == 2
    assert not opened
