"""Pages of poisoned files: text from a file stays text, and rows of another type are left out with a note."""

import json
import re
import shutil
from pathlib import Path

import pytest

import driftgen as dg
from driftgen.report.comparison_page import write_reports
from driftgen.report.run_page import write_report
from driftgen.report.run_rows import NUMBERS
from driftgen.support.sheets import Sheet, write_sheet
from tests.support.report_pages import HEADER, POISON, Page, is_harmless, row, sheet, write_run


def poisoned(value):
    """The same structure with every text poisoned, keys included."""
    if isinstance(value, dict):
        return {POISON if key == "torch" else key: poisoned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return f"{value}{POISON}" if isinstance(value, str) else value


EVALUATION = {
    "figures": {"torch": 1.0, "text": "t"},
    "bars": {"text": "t"},
    "evaluator": "e",
    "note": {"torch": "n"},
    "network_calls_per_image": "c",
    "milliseconds_per_image": "m",
}


def poisoned_run(folder):
    evaluated = {"metric": "FID", "samples": "n", "ema": {"0.9": {"FID" + POISON: 2.0}}}
    rows = [
        row(10, warnings=["kind: problem; advice"], drift_groups={"torch": [1.0], "b": [1.0]}),
        row(20, evaluation=evaluated, unreadable={"count": 1, "names": ["name"]}),
    ]
    write_run(folder, rows=poisoned(rows), steps=())
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    header = json.loads(lines[0])["header"]
    lines[0] = json.dumps({"header": poisoned(header) | {"task": "train"}})
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    names = (f"a{POISON}", f"b{POISON}")
    for step in (0, 20):
        write_sheet(folder / "samples" / f"step-{step:07d}.png", sheet(names))
    write_sheet(folder / "samples" / "real.png", sheet(names))
    nearest = Sheet(sheet(("",)).images, 3, captions=[POISON] * 3, note=POISON)
    write_sheet(folder / "samples" / "nearest.png", nearest)
    text = json.dumps({"about": POISON, "x" + POISON: POISON, "optim": {"steps": 20}})  # JSON is YAML
    (folder / "config.yaml").write_text(text)
    (folder / "evaluation.json").write_text(json.dumps(poisoned(EVALUATION)))
    return folder


def test_poisoned_files_do_no_harm(tmp_path):
    name = "<script>run&'\""
    page = Page(write_report(poisoned_run(tmp_path / name)))
    assert is_harmless(page)
    assert page.texts("h1") == [f"Run {name}"]
    # Everything is there as text: the names of rows, warnings, evaluation, environment, configuration.
    for tag in ("span", "li", "td", "th", "pre", "p", "figcaption", "h3"):
        assert any("alert(1)" in text for text in page.texts(tag)), tag
    other = Page(write_reports([tmp_path / name, poisoned_run(tmp_path / "b")], tmp_path / "page.html"))
    assert is_harmless(other)


@pytest.mark.parametrize("value", ["text", None, [], {}, [[1]], {"a": "b"}, True, 1e999, -1e308, 10**400])
def test_fields_of_another_type_do_no_harm(tmp_path, value):
    rows = [{key: value if key != "step" else step for key in row(1)} for step in (20, 30)]
    more = dict.fromkeys(("warnings", "evaluation", "unreadable", "drift_groups", "batch_spread"), value)
    folder = write_run(
        tmp_path / "run",
        rows=[row(10), *(r | more for r in rows)],
        **dict.fromkeys(("temperatures", "weights", "command", "environment", "recipe"), value),
    )
    (folder / "evaluation.json").write_text(json.dumps(dict.fromkeys(EVALUATION, value)))
    (folder / "config.yaml").write_text(
        json.dumps(dict.fromkeys(("optim", "data", "about", "chosen"), value))
    )
    left_out = 3 if value == 10**400 else 2  # no line with such a number is read, the header neither
    note = f"{left_out} lines are left out of metrics.jsonl: cut, or with values of another type."
    page = Page(write_report(folder))
    assert (note in page.texts("p")) == (value is not None)
    assert page.texts("dd")[0].startswith("30" if value is None else "10")
    page = Page(write_reports([folder, write_run(tmp_path / "other")], tmp_path / "page.html"))
    assert (f"run: {note}" in page.texts("p")) == (value is not None)


def leaves(value, path=()):
    """Paths of all values and keys of a JSON structure."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(entry, (*path, key))
            if isinstance(value, dict):
                yield (*path, key), "key"
    yield path, "value"


def planted(value, path, kind, poison=POISON):
    """The structure with poison in place of one value or key."""
    if not path:
        return poison
    if isinstance(value, list):
        return [planted(v, path[1:], kind, poison) if i == path[0] else v for i, v in enumerate(value)]
    if kind == "key" and len(path) == 1:
        return {poison if k == path[0] else k: v for k, v in value.items()}
    return {k: planted(v, path[1:], kind, poison) if k == path[0] else v for k, v in value.items()}


def whole_run():
    """Every file of text that pages of a run read, with every field that they know."""
    evaluated = {"metric": "FID", "samples": 50, "ema": {"0.9": {"FID": 2.0}}}
    more = dict.fromkeys(NUMBERS, 1.5) | {"neighbors": [2.0], "scale": {"global": 1.0}}
    more |= {
        "drift_groups": {"a": [1.0], "b": [2.0]},
        "evaluation": evaluated,
        "ema_initial_share": {"0.9": [1, 2]},
    }
    more |= {"warnings": ["kind: problem; advice"], "unreadable": {"count": 3, "names": ["photo.png"]}}
    header = HEADER | {"init": "other"}
    chosen = {
        "size": "tiny",
        "reason of the size": "r",
        "generator": "g",
        "encoder": "e",
        "augmentation": "a",
    }
    config = {"task": "train", "about": "a", "optim": {"steps": 20}, "data": {"path": "p"}, "chosen": chosen}
    figures = {
        "figures": {"copied": 1.0, "text": "t"},
        "bars": {"copied": 0.5},
        "evaluator": "e",
        "hardware": "h",
    }
    evaluation = figures | {"note": {"n": "o"}, "network_calls_per_image": 1, "milliseconds_per_image": 0.4}
    metrics = [{"header": header}, row(10), row(20) | more]
    return {"metrics.jsonl": metrics, "config.yaml": config, "evaluation.json": evaluation}


CASES = [(file, path, kind) for file, value in whole_run().items() for path, kind in leaves(value)]


def write_planted(folder, case, poison=POISON):
    """Write the files of a run with poison in the field of the case."""
    for name, value in whole_run().items():
        value = planted(value, *case[1:], poison) if name == case[0] else value
        lines = value if name == "metrics.jsonl" and isinstance(value, list) else [value]
        (folder / name).write_text("\n".join(map(json.dumps, lines)) + "\n")


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e308, float("nan"), float("inf")])
def test_a_number_of_any_size_in_any_field_does_no_harm(tmp_path, number):
    folder = write_run(tmp_path / "run", steps=())
    shutil.rmtree(folder / "samples")
    for case in CASES:
        if case[2] == "value":
            write_planted(folder, case, number)
            write_report(folder)


def test_poison_in_any_field_does_no_harm(tmp_path):
    """One field at a time, of every file: a page that skips a damaged field must not skip the others."""
    folder = write_run(tmp_path / "run", steps=())
    shutil.rmtree(folder / "samples")
    shown = set()
    for case in CASES:
        write_planted(folder, case)
        html = write_report(folder).read_text()
        assert "<script>alert" not in html, case
        assert "<img src=x" not in html, case
        if "alert(1)" in html:
            shown.add(case[0])
    assert shown == {"metrics.jsonl", "config.yaml", "evaluation.json"}  # the poison does reach the pages


def test_text_reaches_a_page_through_the_templates_alone():
    """Nothing turns escaping off, and nothing but the package's own files is marked as safe."""
    report = Path(dg.__file__).parent / "report"
    for path in [*report.glob("*.py"), *report.glob("templates/*.html")]:
        text = path.read_text()
        assert not re.search(r"\|\s*safe|autoescape\s+false|autoescape=False|__html__", text), path
        assert text.count("Markup") == (2 if path.name == "page.py" else 0), path
        assert "</html>" not in text or path.name == "base.html", path
    assert not re.search(
        r"innerHTML|insertAdjacentHTML|document\.write", (report / "templates" / "script.js").read_text()
    )
