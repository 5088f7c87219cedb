"""Code blocks of the documents that need more than a folder to run: sections of docs/extending.md.

tests/test_doc_blocks.py runs all others.
"""

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import driftgen.ops
from driftgen import model_io
from driftgen.training.recipes import load_recipe

ROOT = Path(__file__).parent.parent
SECTIONS = re.split(r"^## ", (ROOT / "docs" / "extending.md").read_text(), flags=re.MULTILINE)[1:]
EXTENDING = {section.splitlines()[0]: section for section in SECTIONS}


def blocks(text, language="python"):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def execute(code, name):
    exec(compile(code, name, "exec"), {"__name__": name})


@pytest.fixture(autouse=True, scope="module")
def _matplotlib():
    """Import the libraries of a run before the first test is timed."""
    import_module("matplotlib.pyplot")
    import_module("driftgen.training.run")


@pytest.fixture(autouse=True)
def _scratch(tmp_path, monkeypatch):
    """Run in an empty folder, with an import path of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("section", ["A kernel", "A normalization", "An encoder", "A generator", "A metric"])
def test_one_block(section):
    (code,) = blocks(EXTENDING[section])
    execute(code, section)


def test_reading_demonstrations():
    (code,) = blocks((ROOT / "docs" / "policy-evaluation.md").read_text())
    shapes = "(observations['observation.state'].shape, actions.shape)"
    execute(f"{code}\nassert {shapes} == ((2, 2, 3), (2, 16, 2))", "policy")


def test_a_task_trains_and_resumes(tmp_path):
    (code,) = blocks(EXTENDING["A task"])
    execute(code, "task")
    assert (tmp_path / "runs" / "moons" / "moons-0.99.safetensors").is_file()
    longer = code.replace("steps=50", "steps=55").replace("override=False", "override=True")
    assert longer.count("55") == longer.count("override=True") == 1
    execute(longer, "task")
    rows = (tmp_path / "runs" / "moons" / "metrics.jsonl").read_text()
    assert '"step": 55' in rows


def test_a_recipe(tmp_path):
    (text,) = blocks(EXTENDING["A recipe"], "yaml")
    (tmp_path / "plain.yaml").write_text(text)
    assert load_recipe("plain.yaml", (), "train").optim.steps == 2000


def test_a_plugin(tmp_path, monkeypatch):
    """The class of the section on generators, from a package that is found by its entry point."""
    (generator,) = blocks(EXTENDING["A generator"])
    (entry,) = blocks(EXTENDING["A plugin package"], "toml")
    (plugin,) = blocks(EXTENDING["A plugin package"])
    (tmp_path / "my_networks.py").write_text(generator.split("dg.register_generator")[0])
    (tmp_path / "my_package.py").write_text(plugin)
    info = tmp_path / "my_package-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 0.1\n")
    points = entry.replace('[project.entry-points."driftgen.plugins"]', "[driftgen.plugins]").replace('"', "")
    (info / "entry_points.txt").write_text(points)
    model_io._load_plugins.cache_clear()
    try:
        assert model_io.get_architecture("generator", "tiny").model.__name__ == "TinyNet"
    finally:
        model_io._load_plugins.cache_clear()
        for name in ("my_package", "my_networks"):
            sys.modules.pop(name, None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs on a CPU")
def test_a_gpu_op(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from driftgen.ops import dispatch

    monkeypatch.setattr(driftgen.ops, "__path__", [*driftgen.ops.__path__, str(tmp_path)])
    monkeypatch.setattr(dispatch, "DEVICES", {"cuda", "cpu"})
    op, kernel, test = blocks(EXTENDING["A GPU op"])
    for code in (op, kernel):
        (tmp_path / Path(code.splitlines()[0].removeprefix("# ")).name).write_text(code)
    try:
        namespace = {"__name__": "test_softcap"}
        exec(compile(test, "test_softcap", "exec"), namespace)
        namespace["test_softcap"]()
    finally:
        for name in ("softcap", "softcap_triton"):
            sys.modules.pop(f"driftgen.ops.{name}", None)
            vars(driftgen.ops).pop(name, None)
