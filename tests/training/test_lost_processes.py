"""Real groups of processes of which one is killed: the others end in one line, and a restart resumes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from driftgen.errors import InputError
from driftgen.support.distributed import Distributed
from driftgen.support.lost_process import LostProcessError, is_lost_process
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.run_start import fresh_folder
from tests.support.fork_server import CAPTURE, start_ranks
from tests.support.runs import SMALL, final

ROOT = Path(__file__).parents[2]
CHANGES = [*SMALL, "batch.classes=6", "encoders=[]", "output.metrics_every=1", "output.checkpoint_every=5"]


def words(folder, *changes):
    settings = [word for change in (*CHANGES, *changes) for word in ("--set", change)]
    return ["-m", "driftgen", "train", "digits", *settings, "--device", "cpu", "--out", str(folder)]


def wait_for_rows(folder, rows, ended):
    metrics = folder / "metrics.jsonl"
    while not metrics.is_file() or len(metrics.read_text().splitlines()) <= rows:
        assert not ended()
        time.sleep(0.02)


@pytest.mark.distributed
@pytest.mark.parametrize("victim", [0, 2])
def test_the_others_end_with_one_line_and_lose_nothing(tmp_path, victim):
    program = words(tmp_path / "run", "optim.steps=100000")
    ranks = start_ranks(program, 3, stdout=CAPTURE, stderr=CAPTURE)
    try:
        wait_for_rows(tmp_path / "run", 7, lambda: ranks[0].poll() is not None)
        ranks[victim].kill()
        for rank, process in enumerate(ranks):
            _, stderr = process.communicate(timeout=10)
            if rank == victim:
                continue
            assert process.returncode == 1
            assert "Traceback" not in stderr
            errors = [line for line in stderr.splitlines() if line.startswith("driftgen: error: ")]
            assert len(errors) == 1, stderr
            step = re.search(r"has ended: its last checkpoint is of step (\d+);.* run the same", errors[0])
            assert int(step[1]) >= 5
            assert rank == 0 or stderr.count("\n") == 1, stderr  # only the main process shows progress
    finally:
        for process in ranks:
            process.kill()
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step == int(step[1])


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("restarts", [0, 1])
def test_torchrun_ends_or_restarts_the_group(tmp_path, restarts):
    """After a restart the run is bit-equal to one that nobody killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def start(folder, logs):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        launch += ["--max-restarts", str(restarts), "--log-dir", str(logs), "--redirects", "3"]
        command = [sys.executable, *launch, *words(folder, "optim.steps=40")]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    run, logs = tmp_path / "run", tmp_path / "logs"
    process = start(run, logs)
    wait_for_rows(run, 12, lambda: process.poll() is not None)
    holder = json.loads((run / "driftgen.lock").read_text())
    os.kill(holder["pid"], signal.SIGKILL)
    code = process.wait(120)
    texts = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("stderr.log")}
    assert not [name for name, text in texts.items() if "Traceback" in text], texts
    (lost,) = [text for name, text in texts.items() if name.endswith("attempt_0/1/stderr.log")]
    assert lost.count("\n") <= 2, lost  # SIGTERM of torchrun, which may come first, and the lost process
    assert "run the same command to resume" in lost
    if not restarts:
        assert code != 0
        assert Checkpoints(run / "checkpoints").load().step >= 10
        return
    assert code == 0
    (again,) = [text for name, text in texts.items() if name.endswith("attempt_1/0/stderr.log")]
    assert int(re.search(r"resumed after step (\d+)", " ".join(again.split()))[1]) >= 10
    assert start(tmp_path / "calm", tmp_path / "calm-logs").wait(120) == 0
    killed, calm = final(run), final(tmp_path / "calm")
    assert killed.keys() == calm.keys()
    assert all(torch.equal(tensor, calm[name]) for name, tensor in killed.items())


def test_errors_of_collectives_are_told_from_others():
    lost = [
        RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:301"),
        RuntimeError(
            "NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error"
        ),
        torch.distributed.DistNetworkError("The client socket has timed out"),
        LostProcessError("another process has ended"),
    ]
    assert all(map(is_lost_process, lost))
    other = [RuntimeError("shape mismatch"), InputError("NCCL error"), KeyboardInterrupt()]
    assert not any(map(is_lost_process, other))


def test_a_restart_without_out_resumes_the_same_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    alone = Distributed.start("cpu")
    assert fresh_folder("digits", alone) == Path("runs/digits")
    for name in ("digits", "digits-2"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert fresh_folder("digits", alone) == Path("runs/digits-3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert fresh_folder("digits", alone) == Path("runs/digits-2")
    assert fresh_folder("toys", alone) == Path("runs/toys")
