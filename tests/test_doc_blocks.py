"""Every code block of the documents runs, or says why it cannot."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.support.doc_blocks import OTHER, ROOT, RUNNABLE, Block, all_blocks, make_home, pages, read_blocks

BLOCKS = all_blocks()
PYTHON = [b for b in BLOCKS if b.runs and b.language == "python"]
SHELL = [b for b in BLOCKS if b.runs and RUNNABLE[b.language] == "shell"]


def test_every_block_runs_or_says_why_not():
    assert len(PYTHON) > 10
    assert len(SHELL) > 12
    for block in BLOCKS:
        where = f"{block.page}:{block.line}"
        assert block.language in {*RUNNABLE, *OTHER}, f"{where}: name the language of the block"
        block.text()  # what it replaces is there
        if block.not_run:
            reason = r"needs |takes |measures |tests/|the tests |a part of "
            assert re.match(reason, block.not_run), f"{where}: say what is missing here"
        if block.tested_by:
            path, _, name = block.tested_by.partition("::")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert name in {getattr(node, "name", None) for node in tree.body}, f"{where}: {block.tested_by}"


def test_no_block_hides_from_the_tests():
    """In a list, or with another fence."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"^([ >\t]+```|~~~|````)", text, re.MULTILINE), path
        assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(read_blocks(path)), path


def test_named_tests_of_unrun_blocks_exist():
    for block in BLOCKS:
        for path in re.findall(r"tests/[\w/.]+", block.not_run):
            assert (ROOT / path).exists(), f"{block.page}:{block.line}: {path}"


def test_markers_are_read(tmp_path, monkeypatch):
    page = ROOT / "docs" / "no-such-page.md"
    monkeypatch.setattr(type(page), "read_text", lambda self, **_: PAGE)
    plain, skipped, changed, named = read_blocks(page)
    assert plain == Block("docs/no-such-page.md", 1, "sh", "a\n")
    assert (skipped.not_run, skipped.runs, plain.runs) == ("needs a GPU", False, True)
    assert changed.text() == "x = 2\n"
    assert named.tested_by == "tests/test_docs.py::f"


PAGE = """```sh
a
```

<!-- not run: needs a GPU -->
```sh
b
```
<!-- run with: 1 => 2 -->
```python
x = 1
```
<!-- tested by: tests/test_docs.py::f -->
```python
```
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A user's folder with a trained run, ``runs/demo``."""
    home = tmp_path_factory.mktemp("home")
    make_home(home, sys.executable)
    run_shell("driftgen train digits --out runs/demo", home)
    return home


@pytest.fixture
def home(template, tmp_path, monkeypatch):
    """A copy of that folder, and the current folder of the test."""
    place = tmp_path / "home"
    shutil.copytree(template, place)
    monkeypatch.chdir(place)
    return place


def run_shell(code, home):
    """Run lines in bash as a user would; an error ends them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    environment |= {"HF_HUB_OFFLINE": "1", "BROWSER": "true", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", code],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("block", SHELL, ids=lambda b: f"{b.page}:{b.line}")
def test_shell_block(block, home):
    # Blocks that follow a training of the same page find its run.
    if "runs/digits" in block.code and "driftgen train digits" not in block.code:
        shutil.copytree(home / "runs" / "demo", home / "runs" / "digits")
    run_shell(block.text(), home)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({b.page for b in PYTHON}))
def test_python_blocks_of_a_page(page, home):
    for block in PYTHON:
        if block.page == page:
            exec(compile(block.text(), f"{page}:{block.line}", "exec"), {"__name__": "block"})
