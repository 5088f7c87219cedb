"""Ctrl-C and SIGTERM at any moment of a run, in a process of its own: a hint, and nothing is lost."""

import os
import signal
import time

import pytest
import torch

from driftgen.support.signals import handle_signals
from driftgen.training.checkpoint import Checkpoints
from tests.support.fork_server import CAPTURE, start_code
from tests.support.runs import SMALL, final, run

# Runs a command that waits inside one function, until the test says go.
PAUSED = """
import sys, time
from importlib import import_module
from pathlib import Path
from driftgen.cli import main

place, name, folder, *words = sys.argv[1:]
module, _, owner = place.partition(":")
owner = getattr(import_module(module), owner) if owner else import_module(module)
function = getattr(owner, name)

def paused(*arguments, **options):
    if not Path(folder, "reached").exists():
        Path(folder, "reached").touch()
        while not Path(folder, "go").exists():
            time.sleep(0.01)
    return function(*arguments, **options)

setattr(owner, name, paused)
sys.argv = ["driftgen", *words]
main()
"""
CHANGES = ["optim.steps=3", "output.metrics_every=1", "output.checkpoint_every=1000"]
PREVIEW = "driftgen.training.trainer:Training", "save_preview"
FINAL_SAVE = "driftgen.training.checkpoint:Checkpoints", "save"
REPORT = "driftgen.report.run_page", "write_report"
BUILD = "driftgen.training.trainer:Training", "__init__"


def stop(tmp_path, moment, *signals):
    """Send signals to a run at a moment, and return its folder and what it printed."""
    flags = tmp_path / moment[1]
    flags.mkdir(parents=True)
    words = ["train", "digits", "--device", "cpu", "--out", str(tmp_path / "r")]
    # The first metrics write a report: that of the moment is the one after the last step.
    late = ["output.metrics_every=3"] if moment == REPORT else []
    words += [word for change in (*SMALL, *CHANGES, *late) for word in ("--set", change)]
    # As many threads as this process has: the last digit of a sum depends on them.
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "COLUMNS": "80"}
    process = start_code(PAUSED, *moment, flags, *words, env=env, stderr=CAPTURE, stdout=CAPTURE)
    while not (flags / "reached").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.1)
    (flags / "go").touch()
    _, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.endswith("driftgen: interrupted\n")
    return tmp_path / "r", errors


@pytest.mark.slow
def test_while_the_first_preview_is_drawn(tmp_path):
    folder, errors = stop(tmp_path, PREVIEW, signal.SIGINT)
    assert "after step 0; run the same command to resume: driftgen train digits" in errors
    assert (folder / "model" / "config.json").is_file()
    _, view = run(folder, *CHANGES)
    assert view.said[0] == "resumed after step 0"
    run(tmp_path / "straight", *CHANGES)
    stopped, straight = final(folder), final(tmp_path / "straight")
    assert stopped.keys() == straight.keys()
    assert all(torch.equal(stopped[key], straight[key]) for key in straight)


def test_outside_the_loop_and_twice(tmp_path):
    """Before the run has begun there is nothing to resume."""
    hint = "run the same command to resume: driftgen train digits"
    folder, errors = stop(tmp_path / "build", BUILD, signal.SIGTERM)
    assert hint not in errors
    assert not folder.exists()
    folder, errors = stop(tmp_path, PREVIEW, signal.SIGINT, signal.SIGINT)
    assert f"stopped {folder}: it has no checkpoint yet; {hint}" in errors
    folder, errors = stop(tmp_path, BUILD, signal.SIGTERM)
    assert f"stopped {folder}: it has no checkpoint yet; {hint}" in errors


@pytest.mark.parametrize("moment", [FINAL_SAVE, REPORT], ids=["save", "report"])
def test_after_the_last_step(tmp_path, moment):
    folder, errors = stop(tmp_path, moment, signal.SIGINT)
    assert f"stopped by Ctrl-C after the last step: {folder} is complete" in errors
    assert "saving the complete run" in errors
    assert "run the same command" not in errors.split("saving the complete run")[1]
    assert Checkpoints(folder / "checkpoints").load().step == 3
    assert (folder / "report.html").is_file()


def test_a_system_with_ctrl_break_stops_by_it_too(monkeypatch):
    """Windows has SIGBREAK, the one signal that another process can send; another one plays it here."""
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    heard, before = [], signal.getsignal(signal.SIGUSR1)
    with handle_signals(heard.append):
        for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
    assert heard == ["Ctrl-Break", "Ctrl-C", "SIGTERM"]
    assert signal.getsignal(signal.SIGUSR1) == before
