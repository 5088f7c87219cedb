"""Tables of the documents are those of the files in results/."""

import json
import re
from pathlib import Path

import pytest

from driftgen.errors import InputError
from tools.cluster_estimate import PARAMETERS, efficiency, exchange_seconds
from tools.gallery import PICTURES
from tools.records import Results, fill, markdown, select
from tools.tables import ROOT, TABLES, main, stale_tables

RESULTS = ROOT / "results"


def test_tables_agree_with_results():
    stale = stale_tables(ROOT, TABLES)
    assert not stale, f"{', '.join(stale)} differs from its files in results/: run make tables"


def test_every_folder_of_results_is_listed():
    text = (RESULTS / "README.md").read_text()
    listed = set(re.findall(r"^\| .*?\]\(([\w-]+)/[^)]*\)", text, re.MULTILINE))
    listed |= set(re.findall(r", \[[\w-]+\]\(([\w-]+)/\) \|", text))
    assert listed == {path.name for path in RESULTS.iterdir() if path.is_dir()}


def test_every_picture_of_the_gallery_exists_and_says_how_it_was_made():
    text = (RESULTS / "README.md").read_text()
    shown = re.findall(r'<img src="([^"]+)"', text)
    assert shown == [picture.path for picture in PICTURES]
    assert all((RESULTS / path).is_file() for path in shown)
    lines = re.findall(r"^<sub>(.*)</sub>$", text, re.MULTILINE)
    assert len(lines) == len(shown)
    for line in lines:
        assert re.fullmatch(
            r"`(driftgen|python) [^`]+` · (one NVIDIA|aarch64|x86_64)[^{}]* · [^{}]{10,}", line
        )


def test_every_picture_of_results_is_shown():
    """In the gallery. An animation and its still count as one."""
    text = (RESULTS / "README.md").read_text()
    for path in [*RESULTS.rglob("*.png"), *RESULTS.rglob("*.gif")]:
        name = path.relative_to(RESULTS).with_suffix("").as_posix()
        assert re.search(rf'"{re.escape(name)}\.(png|gif)"', text), path


@pytest.fixture
def repository(tmp_path):
    """A page with one table, its record and its description."""
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    record = tmp_path / "results" / "speed.json"
    record.write_text(json.dumps({"rows": [{"seconds": 0.0281478, "peak_bytes": 59573027968}]}))
    (tmp_path / "README.md").write_text("before\n<!-- table: speed -->\n<!-- end -->\nafter\n")

    def speed(results):
        row = results.row("speed.json")
        return markdown(("", "time"), [("step", fill("{seconds:.3g ms}, {peak_bytes:.0f GiB}", row))])

    return tmp_path, {"speed": speed}, record


def test_a_table_is_written_and_goes_stale_with_its_record(repository, capsys):
    root, tables, record = repository
    assert main(["--check"], root, tables) == 1
    assert main([], root, tables) == 0
    expected = "| | time |\n|---|---|\n| step | 28.1 ms, 55 GiB |"
    page = f"before\n<!-- table: speed -->\n\n{expected}\n\n<!-- end -->\nafter\n"
    assert (root / "README.md").read_text() == page
    assert main(["--check"], root, tables) == 0
    record.write_text(record.read_text().replace("0.0281478", "0.0291478"))
    capsys.readouterr()
    assert main(["--check"], root, tables) == 1
    message = "README.md: table 'speed' differs from its files in results/: run make tables\n"
    assert capsys.readouterr().err == message
    assert (root / "README.md").read_text() == page  # a check writes nothing
    assert main([], root, tables) == 0
    assert "29.1 ms" in (root / "README.md").read_text()


def test_a_number_changed_by_hand_is_stale(repository):
    root, tables, _ = repository
    main([], root, tables)
    page = root / "README.md"
    page.write_text(page.read_text().replace("28.1", "27.9"))
    assert stale_tables(root, tables) == ["README.md: table 'speed'"]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (
            "<!-- table: sped -->\n<!-- end -->\n",
            "README.md: table='sped' is not known: did you mean 'speed'?",
        ),
        ("<!-- table: speed -->\n", "README.md: each <!-- table: NAME --> needs an <!-- end --> after it"),
        (
            "<!-- table: speed -->\n<!-- table: speed -->\n<!-- end -->\n",
            "README.md: each <!-- table: NAME --> needs an <!-- end --> after it",
        ),
        ("no table\n", "table 'speed' is in no page: mark its place or remove its description"),
    ],
)
def test_wrong_markers_are_named(repository, capsys, page, message):
    root, tables, _ = repository
    (root / "README.md").write_text(page)
    assert main([], root, tables) == 2
    assert capsys.readouterr().err.startswith(message)
    assert (root / "README.md").read_text() == page


def test_a_missing_record_or_key_is_named(repository, capsys):
    root, tables, record = repository
    record.write_text(json.dumps({"rows": [{"seconds": 1.0}]}))
    assert main([], root, tables) == 2
    assert "{peak_bytes:.0f GiB}' does not fit its record: KeyError 'peak_bytes'" in capsys.readouterr().err
    record.unlink()
    assert main([], root, tables) == 2
    assert capsys.readouterr().err.startswith("results/speed.json: No such file or directory")
    record.write_text("{")
    assert main([], root, tables) == 2
    assert capsys.readouterr().err.startswith("results/speed.json is no JSON file")
    assert main(["--chekc"], root, tables) == 2


def test_units_and_nested_keys():
    record = {"figures": {"share": 0.9991}, "rows": [{"rate": 9096.6}], "operations": 1.388e14}
    assert fill("{figures[share]:.1%} of {rows[0][rate]:,.0f images/s}", record) == "99.9% of 9,097 images/s"
    assert fill("{operations:.0f TFLOP}, {more:.2f}", record, more=2) == "139 TFLOP, 2.00"
    with pytest.raises(InputError, match="does not fit its record"):
        fill("{figures[missing]:.1%}", record)


def test_one_row_is_selected():
    rows = [{"mode": "graph", "batch": 1}, {"mode": "graph", "batch": 256}]
    assert select(rows, batch=256) is rows[1]
    with pytest.raises(InputError, match="2 rows have"):
        select(rows, mode="graph")
    with pytest.raises(InputError, match="0 rows have"):
        select(rows, mode="fp8")


def test_cells_that_would_break_a_table_are_refused():
    with pytest.raises(InputError, match="needs 2 cells"):
        markdown(("a", "b"), [("1",)])
    with pytest.raises(InputError, match="without"):
        markdown(("a", "b"), [("1", "x | y")])


def test_a_record_is_read_once(tmp_path):
    (tmp_path / "a.json").write_text('{"rows": [1]}')
    results = Results(tmp_path)
    assert results.load("a.json") is results.load("a.json")


def test_the_estimate_for_many_gpus():
    """One GPU exchanges nothing; two exchange the gradient once; overlap helps."""
    assert exchange_seconds(1, 1e9) == (0, 0)
    assert exchange_seconds(2, 1e9)[0] == pytest.approx(4 * PARAMETERS / 1e9, rel=1e-3)
    worst, best = efficiency(1.0, 64, 50e9)
    assert worst < best < 1


def test_pages_are_described_where_the_list_says():
    """The comment beside each name in TABLES is the page that shows the table."""
    source = Path(ROOT / "tools" / "tables.py").read_text()
    places = re.findall(r'^    "([\w-]+)": .*?,(?:  # ([\w/.-]+\.md).*)?$', source, re.MULTILINE)
    assert [name for name, _ in places] == list(TABLES)
    page = ""
    for name, here in places:
        page = here or page
        assert f"<!-- table: {name} -->" in (ROOT / page).read_text(), name


def test_the_example_of_contributing_is_a_table(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    names = {"fill": fill, "markdown": markdown}
    exec(compile(code, "CONTRIBUTING.md", "exec"), names)
    (tmp_path / "cifar10").mkdir()
    rows = [{"guidance": 1.0, "fid": 7.123, "seconds": 38.21}]
    (tmp_path / "cifar10" / "evaluation.json").write_text(json.dumps({"rows": rows}))
    table = "| guidance | FID | time |\n|---|---|---|\n| 1.0 | 7.12 | 38.2 s |"
    assert names["guidance_sweep"](Results(tmp_path)) == table
