"""The notebook runs from top to bottom, and what it shows was made by its own cells."""

import json
import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.doc_blocks import ROOT

NOTEBOOK = ROOT / "examples" / "drifting.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_stored_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 5
    assert NOTEBOOK.stat().st_size < 1_000_000
    assert not re.search(r"/(home|root|work|tmp|Users)/", json.dumps([cell.outputs for cell in cells]))


def test_links():
    text = "\n".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
    links = re.findall(r"\]\((\.\./[^)]+)\)", text)
    assert links
    assert not [link for link in links if not (NOTEBOOK.parent / link).is_file()]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.text for cell in code_cells(notebook) for output in cell.outputs if "text" in output]
    with_repulsion, without = (
        float(share) for share in re.findall(r": (\d+)% of the points", "".join(printed))
    )
    assert with_repulsion > 30
    assert without < 15
    assert (tmp_path / "runs" / "notebook" / "report.html").is_file()
