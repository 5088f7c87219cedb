"""Odd values on the command line: exit code 0 or 2, one line, and never for long."""

import subprocess

import pytest

from tests.support.bad_command_lines import LINES, cases, commands, make_files
from tests.support.fork_server import CAPTURE, start_driftgen

SECONDS = 60  # of a loaded machine; an idle one needs a few


def try_line(words, folder):
    """Return what is wrong with the answer to a command line, or None."""
    child = start_driftgen(*words, cwd=folder, stdout=CAPTURE, stderr=CAPTURE)
    try:
        _, errors = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        return f"no answer within {SECONDS} s"
    last = (errors.splitlines() or [""])[-1]
    if child.returncode not in (0, 2) or "Traceback" in errors:
        return f"exit code {child.returncode}: {last}"
    if (child.returncode == 2 and not last.startswith("driftgen: error: ")) or "error: ;" in last:
        return f"no message: {last}"
    return None


def test_every_command_has_a_line():
    assert LINES.keys() == commands().keys()


@pytest.mark.slow
def test_lines_that_work(tmp_path):
    """The lines that are made odd work, unless they name a file that is missing on purpose."""
    for i, (name, line) in enumerate(LINES.items()):
        if line is None or {"missing", "nothing"} & set(line):
            continue
        folder = tmp_path / str(i)
        folder.mkdir()
        make_files(folder)
        child = start_driftgen(*name.split(), *line, cwd=folder, stdout=CAPTURE, stderr=CAPTURE)
        _, errors = child.communicate(timeout=120)
        assert child.returncode == 0, f"{name}: {errors[-500:]}"


@pytest.mark.slow
def test_odd_values(tmp_path):
    faults = []
    for i, case in enumerate(cases(limit=150)):
        folder = tmp_path / str(i)
        folder.mkdir()
        make_files(folder)
        if problem := try_line(case.words, folder):
            faults.append(f"{case.odd} in {' '.join(case.words)[:80]}: {problem}")
    assert not faults, "\n".join(faults)


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
        ("policy", "eval", "missing", "--checkpoints", "-1"),
        ("convert",),
        ("bench",),
    ],
    ids=" ".join,
)
def test_known_faults(words, tmp_path):
    make_files(tmp_path)
    assert try_line(words, tmp_path) is None
