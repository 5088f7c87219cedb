"""The driftgen command: output, exit codes and interrupts."""

import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.support.fork_server import CAPTURE, start_driftgen
from tests.support.fork_server import run_driftgen as run


@pytest.mark.slow
def test_toy_writes_its_files(tmp_path):
    done = run("toy", "bimodal", "--init", "collapsed", "--steps", "20", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    names = ["evolution.png", "evolution.gif", "metrics.json", "report.html"]
    assert done.stdout.splitlines()[-4:] == [str(tmp_path / "out" / n) for n in names]
    assert "drift" in done.stderr  # the value in the progress bar
    assert all((tmp_path / "out" / n).stat().st_size > 100 for n in names)


@pytest.mark.slow
def test_study(tmp_path):
    done = run(
        "toy", "bimodal", "--study", "antisymmetry", "--steps", "2", "--samples", "32", "--out", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "| 2.0x repulsion |" in done.stdout
    assert (tmp_path / "table.md").read_text() in done.stdout + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["toy", "bimodl"], "distribution='bimodl' is not known: did you mean 'bimodal'?"),
        (["toy", "missing.npy"], "missing.npy does not exist"),
        (["toy", "{tmp}/garbage.npy"], "garbage.npy cannot be read as an array"),
        (["toy", "{tmp}/nan.npy"], "NaN or infinite values in 1 of 9 points"),
        (["toy", "{tmp}/one.npy"], "one.npy holds 1 point(s)"),
        (["toy", "{tmp}/wide.npy"], "points must have shape [n, 2]"),
        (["toy", "{tmp}"], "is a folder: give a regular file"),
        (["toy", "bimodal", "--temperature", "-1"], "temperature=-1.0 must be a positive number"),
        (["toy", "bimodal", "--temperature", "warm"], "'--temperature'"),
        (["toy", "bimodal", "--positives", "0"], "positives=0 must be a whole number from 1"),
        (["toy", "bimodal", "--init", "nowhere"], "init='nowhere' is not known"),
        (["toy", "bimodal", "--study", "anti"], "study='anti' is not known"),
        (["toy", "bimodal", "--out", "{tmp}/garbage.npy"], "cannot write to"),
        (["toy"], "Missing argument"),
        (["toy", "bimodal", "--speed", "9"], "No such option"),
        (["train", "photos", "--size", "huge"], "error: Invalid value for '--size': 'huge' is not one of"),
        (["tyo"], "No such command 'tyo'"),
        (["demo", "--seed", "-1"], "seed=-1 must be an integer from 0"),
        (["toy", ""], "distribution='' is not known"),
        (["toy", "{tmp}/zip.npy"], "zip.npy cannot be read as an array"),
        (["toy", "bimodal", "--seed", "99999999999999999999"], "must be a whole number"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path, words, message, here, monkeypatch):
    (tmp_path / "garbage.npy").write_text("no array")
    (tmp_path / "zip.npy").write_bytes(b"PK\x03\x04garbage")
    np.save(tmp_path / "nan.npy", np.vstack([np.zeros((8, 2)), [[np.nan, 0]]]))
    np.save(tmp_path / "one.npy", np.zeros((1, 2)))
    np.save(tmp_path / "wide.npy", np.zeros((9, 3)))
    monkeypatch.chdir(tmp_path)
    done = here(*(w.format(tmp=tmp_path) for w in words))
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("driftgen: error: ")
    assert message in lines[0]
    assert done.stdout == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_wrong_input_in_a_process_of_its_own(tmp_path):
    words = [sys.executable, "-m", "driftgen", "toy", "bimodl"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("driftgen: error: distribution='bimodl' is not known")


def test_help_and_version():
    done = run("--help", env={"COLUMNS": "80", "PATH": ""})
    assert done.returncode == 0
    assert all(word in done.stdout for word in ("toy", "demo", "doctor"))
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert run().stdout.split() == run("--help").stdout.split()
    assert re.fullmatch(r"driftgen \d+\.\d+\.\d+\n", run("--version").stdout)


def test_interrupt(tmp_path):
    out = tmp_path / "out"
    words = ["toy", "bimodal", "--generator", "--steps", "100000", "--out", str(out)]
    process = start_driftgen(*words, stderr=CAPTURE, stdout=CAPTURE)
    while not out.exists():  # made right before the first step
        assert process.poll() is None
        time.sleep(0.1)
    (out / "metrics.json").write_text("old")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert stderr.rstrip().endswith("driftgen: interrupted")
    assert [p.name for p in out.iterdir()] == ["metrics.json"]
    assert (out / "metrics.json").read_text() == "old"


@pytest.mark.slow
def test_import_is_light():
    """Importing driftgen is fast and imports no plotting or model library."""
    code = (
        "import sys, time, torch; start = time.perf_counter(); import driftgen; "
        "print(time.perf_counter() - start, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, *modules = done.stdout.split()
    assert not {"matplotlib", "transformers", "diffusers", "typer", "rich"} & set(modules)
    assert float(seconds) < 1.0  # about 0.3 s beyond importing torch on an idle machine


def test_a_folder_of_images_is_named_before_it_is_read(here, tmp_path, monkeypatch):
    """Not one that has the name of the recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("digits", "photos"):
        (tmp_path / name).mkdir()
    wrong = ("--set", "nothing=1")
    for words, read in (
        (["digits"], ""),
        (["digits/"], "reading digits/ ...\n"),
        (["photos"], "reading photos ...\n"),
        (["folder", "--set", "data.path=~/photos"], "reading ~/photos ...\n"),
        (["photos", "--set", "data.path=photos.npz"], ""),
    ):
        done = here("train", *words, *wrong)
        assert done.returncode == 2
        assert done.stderr.startswith(f"{read}driftgen: error: nothing is not known"), words
