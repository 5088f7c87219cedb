"""``driftgen report``: what it writes, and one line for every mistake."""

import json

import pytest


def write_run(
    folder, rows=({"step": 5, "loss": 1.0},), config="optim: {steps: 5}\noutput: {metrics_every: 5}\n"
):
    folder.mkdir()
    lines = [{"header": {"task": "train"}}, *rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(config)
    return folder


def test_it_writes_pages(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    done = here("report", first)
    assert (done.returncode, done.stdout.strip()) == (0, str(first / "report.html"))
    done = here("report", first, second)
    assert (done.returncode, done.stdout.strip()) == (0, "comparison.html")
    assert "Comparison of 2 runs" in (tmp_path / "comparison.html").read_text()
    done = here("report", first, second, "--out", tmp_path / "new" / "page.html")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "new" / "page.html"))


def test_a_line_cut_off_by_a_kill_is_skipped(tmp_path, here):
    folder = write_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    assert here("report", folder).returncode == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: [t / "none"], "none is not a folder: give the folder of a run"),
        (lambda t: [(write_run(t / "a") / "config.yaml")], "is not a folder"),
        (lambda t: [t], "holds no run: config.yaml is missing"),
        (lambda t: [write_run(t / "a", rows=())], "a has no metrics yet: wait for step 5, then run"),
        (lambda t: [write_run(t / "a", config="")], "config.yaml cannot be read"),
        (lambda t: [write_run(t / "a", config="{[")], "config.yaml cannot be read"),
        (lambda t: [write_run(t / "a"), t / "none"], "none is not a folder"),
        (lambda t: [write_run(t / "a"), write_run(t / "b", rows=())], "b has no metrics yet"),
        (lambda t: [write_run(t / "a"), t / "a" / "." / "../a"], "a is given twice"),
        (lambda t: [write_run(t / "a"), "--out", t], "is not an HTML file"),
        (lambda t: [write_run(t / "a"), "--out", t / "x.pdf"], "x.pdf is not an HTML file"),
        (lambda t: [write_run(t / "a"), "--out", t / "a" / "config.yaml" / "x.html"], "cannot write to"),
        (lambda t: [write_run(t / str(i)) for i in range(17)], "17 runs given: a page compares at most 16"),
        (lambda t: [], "see 'driftgen report --help'"),
    ],
)
def test_bad_input_is_one_line(tmp_path, here, make, says):
    done = here("report", *make(tmp_path))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("driftgen: error: ")
    assert says in line
    assert not list(tmp_path.rglob("*.html"))


def test_a_run_without_its_metrics(tmp_path, here):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    done = here("report", folder)
    assert done.returncode == 2
    assert "metrics.jsonl is missing" in done.stderr
