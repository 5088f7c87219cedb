"""Imports point one way: which packages each part of driftgen knows, also in functions and for types
alone.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "driftgen"
# Also through the modules that stand beside the packages. A module that is not here knows no package.
KNOWS = {
    "fused": set(),
    "passes": {"fused"},
    "loss": {"fused"},
    "features": set(),
    "generators": set(),
    "data": set(),
    "evaluation": {"data"},
    "saved": {"features", "generators"},
    "interop": {"features", "generators"},
    "pipeline": {"features", "generators", "interop"},
    "training": {"data", "evaluation", "features", "fused", "generators", "interop"},
    "report": {"data", "evaluation", "features", "generators", "interop", "training"},
    "bench": {"data", "evaluation", "features", "fused", "generators", "interop", "report", "training"},
    "cli": {"bench", "data", "evaluation", "features", "generators", "interop", "report", "training"},
    "__init__": {"data", "features", "fused", "generators", "interop"},
    "__main__": {"cli"},
}
PACKAGES = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
PARTS = sorted(PACKAGES | {path.stem for path in PACKAGE.glob("*.py")})


def names(path):
    """What a file imports of driftgen, as dotted names."""
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


def test_imports_in_functions_and_for_types_count(tmp_path):
    path = tmp_path / "some.py"
    path.write_text(
        "if TYPE_CHECKING:\n    from driftgen.training.config import Data\n"
        "def f():\n    from driftgen import report\n    import driftgen.cli as c\n"
    )
    assert set(names(path)) == {"driftgen.training.config", "driftgen.report", "driftgen.cli"}
