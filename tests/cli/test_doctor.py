"""``driftgen doctor`` offers what exists: extras with a use, and commands that work where they are typed."""

import ast
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch
import typer

from driftgen import doctor
from driftgen.cli import app
from driftgen.doctor import EXTRAS
from tests.support.fork_server import run_driftgen as run

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SOURCES = [*(ROOT / "driftgen").rglob("*.py")]


def test_one_thread_is_not_plural():
    (cpu,) = (finding for finding in doctor.examine() if finding.name == "CPU")
    count = torch.get_num_threads()
    assert cpu.value.endswith(", 1 thread" if count == 1 else f", {count} threads")


@cache
def nodes(path):
    """Return all nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imported():
    """Return the modules that the package imports, by statement or by name."""
    names = set()
    for path in (p for p in SOURCES if p.name != "doctor.py"):
        for node in nodes(path):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module)
            elif isinstance(node, ast.Call):  # of import_module, or of a function that calls it
                names |= {a.value for a in node.args if isinstance(getattr(a, "value", None), str)}
    return {name.split(".")[0] for name in names}


def test_extras_are_those_of_the_package_that_something_uses():
    used = imported()
    assert EXTRAS.keys() <= PROJECT.keys()
    for name, requirements in PROJECT.items():
        modules = {re.split(r"[<>=;\[ ]", r)[0].replace("-", "_") for r in requirements}
        if name == "all":  # of the others
            assert modules == {"driftgen"}
        elif name == "dev":
            assert set(EXTRAS["dev"].modules) <= modules
        elif name in EXTRAS:
            assert set(EXTRAS[name].modules) == modules
            assert modules & used, f"nothing uses [{name}]"
        else:
            assert not modules & used, f"something uses [{name}]: doctor must offer it"


def test_every_extra_that_is_offered_is_named():
    done = run("doctor", env={"COLUMNS": "100", "PATH": ""})
    assert done.returncode == 0, done.stderr
    for name in EXTRAS:
        assert f"[{name}]" in done.stdout
    for name in PROJECT.keys() - EXTRAS.keys():
        assert f"[{name}]" not in done.stdout
    assert "torch" in done.stdout


def words_after(text, word):
    """Return the word after each ``word`` in strings of the source."""
    return re.findall(rf"(?<![\w./]){word} ([a-z][a-z-]+)", text)


def test_commands_in_messages_exist():
    commands = set(typer.main.get_command(app).commands)
    # Words after the name of the package in prose.
    prose = {"as", "from", "import", "latents", "model", "reference"}
    for path in SOURCES:
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert set(words_after(node.value, "driftgen")) <= commands | prose, path


def test_extras_in_messages_exist():
    for path in SOURCES:
        assert set(re.findall(r"driftgen\[(\w+)\]", path.read_text())) <= EXTRAS.keys(), path


def test_the_command_names_files_that_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert doctor.install_command("eval") == "pip install -c constraints.txt -e '.[eval]'"
    monkeypatch.chdir(tmp_path)
    words = shlex.split(doctor.install_command("eval"))
    assert words[:3] == ["pip", "install", "-c"]
    assert Path(words[3]).is_file()
    project, _, extra = words[5].partition("[")
    assert (Path(project) / "pyproject.toml").is_file()
    assert extra == "eval]"


def test_an_installed_package_is_installed_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "driftgen").mkdir()
    monkeypatch.setattr(doctor, "__file__", str(tmp_path / "driftgen" / "doctor.py"))
    assert doctor.install_command("eval") == "pip install 'driftgen[eval]'"


def test_a_folder_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "no_such_module").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not doctor._installed("no_such_module")
    assert doctor._installed("torch")


@pytest.mark.parametrize("columns", [60, 80])
def test_the_report_fits_the_terminal(columns, here, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    done = here("doctor")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= columns
    assert "…" not in done.stdout
