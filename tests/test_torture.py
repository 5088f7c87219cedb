"""``make torture``: a small part of its searches, and the runner with planted faults."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.support import bad_command_lines, killed_runs, memory_growth
from tests.support.fault_search import Counts, Fault, chosen, run_search
from tests.support.fork_server import CAPTURE, ROOT, start_code
from tools import torture

PLANTED = """
import json, signal, sys, time
kind = {kind!r}
record = {{"tried": 7, "kinds": {{"a": 3}}, "largest": {{"seconds": 0.5}}, "faults": []}}
print(json.dumps(record), flush=True)
if kind == "fault":
    record["faults"] = [{{"text": "it broke", "command": "python -m again --seed 1"}}]
    print(json.dumps(record), flush=True)
    sys.exit(1)
if kind == "crash":
    raise RuntimeError("no such thing")
if kind == "kill":
    signal.raise_signal(signal.SIGKILL)
if kind == "hang":
    time.sleep(600)
"""


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Make parts of the runner that end in given ways."""

    def make(**kinds):
        folder = tmp_path / "planted"
        folder.mkdir()
        for name, kind in kinds.items():
            (folder / f"planted_{name}.py").write_text(PLANTED.format(kind=kind))
        monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
        parts = {name: torture.Part(f"planted_{name}", 1, "planted") for name in kinds}
        monkeypatch.setattr(torture, "PARTS", parts)
        monkeypatch.setattr(torture, "check_parts", lambda names: None)

    return make


def run_torture(tmp_path, *words):
    code = torture.main(["--out", str(tmp_path / "out"), "--minutes", "0.02", "--seed", "5", *words])
    record = json.loads((tmp_path / "out" / "reliability.json").read_text())
    faults = [json.loads(line) for line in (tmp_path / "out" / "faults.jsonl").read_text().splitlines()]
    return code, record, faults


def test_figures_without_faults(plant, tmp_path):
    plant(one="", two="")
    code, record, faults = run_torture(tmp_path)
    assert (code, faults) == (0, [])
    assert record["parts"]["two"]["tried"] == 7
    assert record["parts"]["one"]["kinds"] == {"a": 3}
    assert (record["seed"], record["faults"], record["complete"]) == (5, 0, True)
    assert record["command"].startswith("python -m tools.torture --out")
    assert record.keys() >= {"driftgen", "torch", "python", "hardware", "system", "cores"}


@pytest.mark.parametrize(
    ("kind", "text", "command"),
    [
        ("fault", "it broke", "python -m again --seed 1"),
        ("crash", "bad: exit code 1: RuntimeError: no such thing", "python -m planted_bad --seconds 1"),
        ("kill", "bad: exit code -9: ", "python -m planted_bad --seconds 1 --seed 5 --json"),
        ("hang", "bad: no end 0 s after its time: ", "python -m planted_bad --seconds 1 --seed 5 --json"),
    ],
)  # fmt: skip
def test_a_planted_fault_gives_exit_code_1_and_its_reproduction(
    plant, tmp_path, capsys, monkeypatch, kind, text, command
):
    monkeypatch.setattr(torture, "GRACE", 0.0 if kind == "hang" else 60.0)
    plant(good="", bad=kind)
    code, record, (fault,) = run_torture(tmp_path)
    assert (code, record["faults"], record["parts"]["bad"]["faults"]) == (1, 1, 1)
    assert (fault["part"], fault["text"]) == ("bad", text)
    assert fault["command"].startswith(command)
    assert command[:30] in capsys.readouterr().err


def test_only_and_a_missing_part(tmp_path, capsys, monkeypatch):
    missing = {"numbers": torture.Part("tests.support.missing", 1, "")}
    monkeypatch.setattr(torture, "PARTS", missing)
    assert torture.main(["--out", str(tmp_path), "--only", "numbers"]) == 2
    assert capsys.readouterr().err == (
        "part 'numbers' needs tests/support/missing.py, which is missing: see --only\n"
    )
    with pytest.raises(SystemExit):
        torture.main(["--only", "nothing"])


def test_parts_share_the_time_and_fit_into_it():
    runner = torture.Runner(torture.PARTS, 28, 0, 2)
    lanes = [0.0, 0.0]
    for progress in runner.progress.values():
        lanes[lanes.index(min(lanes))] += progress.seconds
    assert max(lanes) <= 28 * 60
    assert all(progress.seconds > 60 for progress in runner.progress.values())


def test_lines_of_a_search():
    progress = torture.Progress()
    fault = {"text": "V is off by 0.01: seed 4, Case(...)", "command": "again"}
    for count, error, faults in ((1200, 2.5e-6, []), (34, 1e-6, [fault])):
        record = {"tried": count, "kinds": {"excluded": 2}, "largest": {"relative error": error}}
        torture.read_counts(progress, json.dumps({**record, "faults": faults}))
    torture.read_counts(progress, "a warning of a library")
    assert (progress.tried, progress.largest, progress.faults) == (1234, {"relative error": 2.5e-6}, [fault])
    assert progress.kinds == {"excluded": 4}


@pytest.mark.slow
def test_ctrl_c_writes_what_there_is(tmp_path):
    words = ["--out", tmp_path / "out", "--minutes", "5", "--seed", "1", "--only", "files"]
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.torture", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(12)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped before the end" in errors
    assert "Traceback" not in errors
    record = json.loads((tmp_path / "out" / "reliability.json").read_text())
    assert record["complete"] is False
    assert record["parts"]["files"]["state"] == "stopped"


# --- a small part of each search --------------------------------------------------------------------------


def test_counts_add_up():
    a = Counts(2, largest={"seconds": 1.0, "x": 2.0})
    a.kinds["killed"] += 1
    b = Counts(3, largest={"seconds": 3.0}, faults=[Fault("it broke", "again")])
    both = a + b
    assert (both.tried, both.kinds, both.largest) == (5, {"killed": 1}, {"seconds": 3.0, "x": 2.0})
    assert both.line() == "5 tried, 1 killed, largest seconds 3, largest x 2, 1 faults"


def test_a_search_ends_by_time_by_cases_and_closes():
    closed = []

    def search(seed, only, seconds):
        try:
            while True:
                time.sleep(0.01)
                yield Counts(1)
        finally:
            closed.append(seed)

    assert run_search(search, 60, 1, cases=3).tried == 3
    assert 2 < run_search(search, 0.1, 2).tried < 12
    assert closed == [1, 2]


def test_names_are_chosen_exactly_or_by_a_part():
    assert chosen(["a", "ab", "b"], "a") == ["a"]
    assert chosen(["aa", "ab", "b"], "a") == ["aa", "ab"]
    with pytest.raises(SystemExit, match="is in none of"):
        chosen(["a"], "x")


def test_some_odd_command_lines():
    counts = run_search(bad_command_lines.search, 600, 1, cases=2)
    assert counts.tried == 2
    assert not counts.faults, "\n".join(map(str, counts.faults))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A run that nobody stops."""
    return killed_runs.reference("training", tmp_path_factory.mktemp("calm") / "run")


@pytest.mark.slow
def test_a_killed_run_is_resumed(calm, tmp_path):
    survived, number = 0, 14
    while not survived and number < 24:  # on a busy machine a run may end before its stop
        counts = killed_runs.try_run("training", number, calm, tmp_path / f"killed-{number}")
        assert not counts.faults, "\n".join(map(str, counts.faults))
        survived = sum(count for kind, count in counts.kinds.items() if "survived" in kind)
        number += 1
    assert survived


def test_another_result_of_a_run_is_found(calm):
    killed_runs.check_equal(calm.folder, calm)
    name = next(iter(calm.tensors))
    changed = {**calm.tensors, name: calm.tensors[name] + 1}
    with pytest.raises(killed_runs.WrongError, match="differs from the other"):
        killed_runs.check_equal(calm.folder, dataclasses.replace(calm, tensors=changed))


def test_sigterm_may_end_a_process_before_and_after_its_run_only(calm, tmp_path):
    check, text = killed_runs.check_interrupted, "resumed after step 24: the run is complete"
    check("it", -signal.SIGTERM, "", tmp_path)
    check("it", -signal.SIGTERM, text, calm.folder)
    held = tmp_path / "held"
    shutil.copytree(calm.folder, held)
    (held / "driftgen.lock").touch()
    unfinished = tmp_path / "unfinished"
    shutil.copytree(calm.folder, unfinished)
    shutil.rmtree(max((unfinished / "checkpoints").iterdir()))
    for folder in (held, unfinished):
        with pytest.raises(killed_runs.WrongError, match="the run had begun"):
            check("it", -signal.SIGTERM, text, folder)
    check("it", 130, "driftgen: interrupted\n", held)
    with pytest.raises(killed_runs.WrongError, match="no message"):
        check("it", 130, text, calm.folder)


def test_a_traceback_is_shown_with_its_place():
    code = "import atexit; atexit.register(lambda: 1 / 0)"
    process = start_code(code, stdout=CAPTURE, stderr=CAPTURE)
    with pytest.raises(killed_runs.WrongError, match=r"it: a traceback: Exception .*ZeroDivisionError"):
        killed_runs.finish([process], "it", (0,))


def test_ctrl_c_may_be_printed_before_the_program_begins_only():
    def end(place):
        code = f"exec(compile('raise KeyboardInterrupt', {place!r}, 'exec'))"
        process = start_code(code, stdout=CAPTURE, stderr=CAPTURE)
        return killed_runs.finish([process], "it", (0, 130))

    end("runpy.py")
    with pytest.raises(killed_runs.WrongError, match=r"it: a traceback: .*KeyboardInterrupt"):
        end("driftgen/__main__.py")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", killed_runs.KINDS)
def test_killed_runs(kind):
    counts = run_search(killed_runs.search, 600, 0, only=kind, cases=3)
    assert not counts.faults, "\n".join(map(str, counts.faults))
    assert sum(count for name, count in counts.kinds.items() if "survived" in name) >= 1  # some ended before


def test_memory_is_measured_at_every_step(tmp_path):
    sizes = memory_growth.measure(tmp_path / "run", 4, lambda sizes: None)
    assert list(sizes) == [1, 2, 3, 4]
    assert all(size > 10**7 for size in sizes.values())
