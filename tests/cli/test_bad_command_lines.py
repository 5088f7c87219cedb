"""Odd values on the command line: exit code 0 or 2, one line, and never for long."""

from pathlib import Path

import pytest

from tests.support.bad_command_lines import (
    LINES,
    PROMPT,
    REFUSED,
    commands,
    find_problem,
    make_files,
    search,
    try_line,
)
from tests.support.fault_search import run_search
from tests.support.fork_server import CAPTURE, start_driftgen


def test_every_command_has_a_line():
    assert LINES.keys() == commands().keys()


@pytest.mark.slow
def test_lines_that_work(tmp_path):
    """The lines that are made odd work, or are refused at the last check on purpose."""
    for i, (name, line) in enumerate(LINES.items()):
        if line is None:
            continue
        folder = tmp_path / str(i)
        folder.mkdir()
        make_files(folder, line)
        child = start_driftgen(*name.split(), *line, cwd=folder, stdout=CAPTURE, stderr=CAPTURE)
        _, errors = child.communicate(timeout=120)
        assert child.returncode == (2 if name in REFUSED else 0), f"{name}: {errors[-500:]}"


@pytest.mark.slow
def test_odd_values():
    counts = run_search(search, 600, 0, cases=80)
    assert counts.tried == 80
    assert not counts.faults, "\n".join(map(str, counts.faults))


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "digits", "--guidance", "1e300"),
        ("sample", "digits", "--number", str(10**30)),
        ("sample", "digits", "--labels", "0-99999999999"),
        ("sample", "digits", "--device", "meta"),
        ("encode", "images.npz", "out", "--size", "0"),
        ("encode", "images.npz", "out", "--workers", "-1"),
        ("encode", "~nouser/x", "out"),
        ("train", "digits", "--set", "optim.betas=[1,1]"),
        ("train", "digits", "--set", "guidance.power=-1000"),
        ("train", "digits", "--set", "guidance.high=1e308"),
        ("train", "digits", "--set", "data.path=~nouser/x", "--set", "data.kind=images"),
        ("bench", "loss", "--negatives", str(10**30)),
        ("bench", "loss", "--device", "cpu", "--json", "/dev/null"),
        (
            "bench",
            "sampling",
            "--preset",
            "32px",
            "--batch",
            str(10**30),
            "--mode",
            "eager",
            "--device",
            "cpu",
        ),
        ("policy", "eval", "missing", "--checkpoints", "-1"),
        ("pretrain", ".", "--dry-run"),
        ("eval", "digits", "--data", "digits", "--encoder", "pixels", "--seed", "-1", "--device", "cpu"),
        ("eval", "digits", "--data", "digits", "--encoder", "pixels", "--samples", str(10**8)),
        ("convert",),
        ("bench",),
    ],
    ids=" ".join,
)
def test_known_faults(words, tmp_path):
    make_files(tmp_path)
    assert try_line(words, tmp_path).problem is None
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    ("code", "errors", "seconds", "problem"),
    [
        (0, "whatever\nit says", 100.0, None),
        (2, "reading x ...\ndriftgen: error: no\n", 1.0, None),
        (2, "driftgen: error: no\n", PROMPT + 1.0, "refused after 31 s"),
        (2, "something\ndriftgen: error: no\n", 1.0, "2 lines"),
        (2, "no\n", 1.0, "no message"),
        (1, "driftgen: error: no\n", 1.0, "exit code 1"),
        (2, "Traceback (most recent call last):\n", 1.0, "exit code 2: Traceback"),
    ],
)
def test_wrong_answers_are_faults(code, errors, seconds, problem):
    found = find_problem(code, errors, seconds)
    assert found is None if problem is None else problem in found
