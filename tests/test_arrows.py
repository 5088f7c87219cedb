"""Imports point one way: which packages each part of driftgen knows, also in functions and for types
alone.
"""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "driftgen"
# Which rooms a room may import, directly or through a ground-floor module.
KNOWS = {
    "support": set(),
    "ops": {"support"},
    "drift": {"ops", "support"},
    "features": {"ops", "support"},
    "generators": {"ops", "support"},
    "tokenizers": {"support"},
    "data": {"drift", "ops", "support", "tokenizers"},
    "evaluation": {
        *("data", "drift", "features", "generators", "interop", "ops", "support", "tokenizers"),
    },
    "policy": {"drift", "features", "generators", "interop", "ops", "support"},
    "model_io": {"features", "generators", "interop", "ops", "support"},
    "interop": {"features", "generators", "ops", "support"},
    "pipeline": {"features", "generators", "interop", "ops", "support", "tokenizers"},
    "training": {
        *("data", "drift", "evaluation", "features", "generators", "interop", "ops", "policy", "support"),
        "tokenizers",
    },
    "report": {
        *("data", "drift", "evaluation", "features", "generators", "interop", "ops", "support"),
        *("tokenizers", "training"),
    },
    "demo": {
        *("data", "drift", "evaluation", "features", "generators", "interop", "ops", "report", "support"),
        *("tokenizers", "training"),
    },
    "bench": {
        *("data", "drift", "evaluation", "features", "generators", "interop", "ops", "report", "support"),
        *("tokenizers", "training"),
    },
    "serve": {"features", "generators", "interop", "ops", "policy", "support", "tokenizers"},
    "studio": {
        *("data", "drift", "evaluation", "features", "generators", "interop", "ops", "policy", "report"),
        *("support", "tokenizers", "training"),
    },
    "cli": {
        *("bench", "data", "drift", "evaluation", "features", "generators", "interop", "ops", "policy"),
        *("report", "serve", "studio", "support", "tokenizers", "training"),
    },
    # Where training and report meet, in dg.train and dg.pretrain: imported on first use.
    "__init__": {
        *("data", "drift", "evaluation", "features", "generators", "interop", "ops", "policy", "report"),
        *("support", "tokenizers", "training"),
    },
    "__main__": {"cli"},
}
GROUND_FLOOR = {"__init__", "__main__", "demo", "doctor", "errors", "model_io", "pipeline"}
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
PARTS = sorted(PACKAGES | {path.stem for path in PACKAGE.glob("*.py")})


@cache
def names(path):
    """What a file imports, as dotted names."""
    return list(_names(path))


def _names(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            if node.module == "driftgen":
                yield from (f"driftgen.{alias.name}" for alias in node.names)
            else:
                yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def imported(part):
    """The parts that a part imports. Plain ``import driftgen``, for the version, does not count."""
    files = (PACKAGE / part).rglob("*.py") if part in PACKAGES else [PACKAGE / f"{part}.py"]
    found = {name.split(".")[1] for path in files for name in names(path) if name.startswith("driftgen.")}
    return (found & set(PARTS)) - {part}


def known(part):
    """The packages among them, and those that the modules among them know."""
    seen, waiting = set(), [part]
    while waiting:
        new = imported(waiting.pop()) - seen
        seen |= new
        waiting += new - PACKAGES
    return seen & PACKAGES


def test_every_package_has_its_place():
    assert PACKAGES <= KNOWS.keys() <= set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_imports_point_one_way(part):
    assert known(part) <= KNOWS.get(part, set())


def test_no_part_reaches_itself():
    for start in set(PARTS) - {"__init__"}:
        seen, waiting = set(), [start]
        while waiting:
            new = imported(waiting.pop()) - seen
            seen |= new
            waiting += new
        assert start not in seen


def module_of(name):
    """The file of a module, or of the module that a name is taken from; None for a package."""
    parts = name.split(".")[1:]
    for n in (len(parts), len(parts) - 1):
        path = PACKAGE.joinpath(*parts[:n]).with_suffix(".py")
        if n and path.is_file():
            return path
    return None


def test_no_file_reaches_itself():
    graph = {
        path: {module_of(name) for name in names(path) if name.startswith("driftgen.")} - {None, path}
        for path in PACKAGE.rglob("*.py")
    }
    circles = TopologicalSorter(graph)
    try:
        circles.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(path.name for path in error.args[1]))


def test_imports_in_functions_and_for_types_count(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        "if TYPE_CHECKING:\n    from driftgen.training.config import Data\n"
        "def f():\n    from driftgen import report\n    import driftgen.cli as c\n"
    )
    assert set(names(path)) == {"driftgen.training.config", "driftgen.report", "driftgen.cli"}


def test_ground_floor_holds_what_the_design_names():
    assert {path.stem for path in PACKAGE.glob("*.py")} == GROUND_FLOOR


def test_no_file_is_longer_than_one_sitting():
    long = {str(p): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_no_name_stands_for_two_files():
    # Named by their rooms: the options of data and of a run; opening images and drawing them.
    shared = {"__init__", "config", "images"}
    stems = [path.stem for path in PACKAGE.rglob("*.py") if path.stem not in shared]
    assert len(stems) == len(set(stems)), sorted(s for s in set(stems) if stems.count(s) > 1)


def test_no_test_imports_another():
    for path in Path(__file__).parent.rglob("test_*.py"):
        imports = [
            node.module or ""
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
        ]
        assert not [name for name in imports if name.rpartition(".")[2].startswith("test_")], path
