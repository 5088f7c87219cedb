"""Saves that do not come to their end, on a full disk or in a killed process: what was there stays whole."""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from driftgen.training.checkpoint import Checkpoints
from tests.support.checkpoint_states import names, state, step_of
from tests.support.fork_server import CAPTURE, ROOT, run_code, start_code
from tests.support.helpers import fails

# --- a full disk ------------------------------------------------------------------------------------------

FILL = """
import sys, torch
from driftgen.errors import InputError
from driftgen.training.checkpoint import Checkpoints
folder, limit = sys.argv[1], int(sys.argv[2])
checkpoints = Checkpoints(folder, keep_last=5)
checkpoints.save(1, {"weights": torch.full((1000,), 1.0)}, {"step": 1})
if limit:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    for step in range(2, 30):
        checkpoints.save(step, {"weights": torch.full((100_000,), float(step))}, {"step": step})
except InputError as error:
    print(error)
import pathlib
print(sorted(path.name for path in pathlib.Path(folder).iterdir()))
found = checkpoints.load()
print(found.step, set(found.tensors["weights"].tolist()), found.record, checkpoints.damaged)
"""


def test_a_file_that_may_not_grow(tmp_path):
    lines = run_code(FILL, tmp_path, 50_000).stdout.splitlines()
    last = tmp_path / "step-00000001"
    assert lines == [
        f"the disk is full: step-00000002 could not be written to {tmp_path} (File too large); free "
        f"space and run the same command to resume; the last good checkpoint is {last}",
        "['step-00000001']",
        "1 {1.0} {'step': 1} []",
    ]


@pytest.mark.slow
def test_a_disk_that_is_full(tmp_path):
    """A real one, of 1 MB: two checkpoints of 400 kB fit, the third does not."""
    code = tmp_path / "fill.py"
    code.write_text(FILL)
    disk = tmp_path / "disk"
    disk.mkdir()
    command = f"mount -t tmpfs -o size=1m none {disk} && exec {sys.executable} {code} {disk} 0"
    try:
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("needs the right to mount")
    message, left, found = done.stdout.splitlines()
    assert message.startswith("the disk is full: step-00000004 could not be written to")
    assert "(No space left on device); free space" in message
    assert message.endswith(f"the last good checkpoint is {disk}/step-00000003")
    assert left == "['step-00000001', 'step-00000002', 'step-00000003']"
    assert found == "3 {3.0} {'step': 3} []"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", range(1, 7))
def test_a_disk_that_refuses_at_any_point(tmp_path, monkeypatch, number, call):
    """fsync of three files and two folders, and the renames before it: what is there stays, nothing else."""
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, state(1), {"step": 1})
    calls = 0

    def refuse(real):
        def wrapped(*arguments):
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(number, os.strerror(number))
            return real(*arguments)

        return wrapped

    monkeypatch.setattr(os, "fsync", refuse(os.fsync))
    monkeypatch.setattr(Path, "replace", refuse(Path.replace))
    fails(
        lambda: checkpoints.save(2, state(2), {"step": 2}),
        "^step-00000002 could not be written" if number == errno.EIO else "^the disk is full: step-00000002",
    )
    monkeypatch.undo()
    # The sixth call is the flush of the folder, when the new one is already there.
    good = 2 if call == 6 else 1
    assert step_of(checkpoints.load()) == good
    assert checkpoints.damaged == []
    assert not [name for name in names(tmp_path) if "." in name]
    checkpoints.save(3, state(3), {"step": 3})
    assert names(tmp_path) == ["step-00000003"]


# --- a killed process -------------------------------------------------------------------------------------

LOOP = """
import os, sys, torch
from driftgen.training.checkpoint import Checkpoints

def work(folder, times):
    checkpoints = Checkpoints(folder, 2, 50)
    found = checkpoints.load()
    assert not checkpoints.damaged, checkpoints.damaged
    step = found.step if found else 0
    while True:
        step += 1
        for _ in range(times):
            tensors = {str(i): torch.full((300_000,), float(step)) for i in range(3)}
            checkpoints.save(step, tensors, {"step": step})

for line in sys.stdin:
    folder, times = line.split()
    number = os.fork()
    if not number:
        work(folder, int(times))
    print(number, flush=True)
    print(os.waitpid(number, 0)[1], flush=True)
"""


@pytest.mark.parametrize("times", [1, 2])
def test_killed_at_any_moment(tmp_path, times):
    """kill -9 ten times, and ten times where each step is saved twice: what is left is always whole, and no
    older than what was seen before.
    """
    chance = random.Random(times)
    folder = tmp_path / "checkpoints"
    process = start_code(LOOP, stdin=CAPTURE, stdout=CAPTURE)
    checkpoints, reached, partial = Checkpoints(folder), 0, 0
    for _ in range(10):
        process.stdin.write(f"{folder} {times}\n")
        process.stdin.flush()
        number = int(process.stdout.readline())
        time.sleep(chance.uniform(0.02, 0.3))
        os.kill(number, signal.SIGKILL)
        assert int(process.stdout.readline()) == signal.SIGKILL
        partial += any("." in name for name in names(folder)) if folder.exists() else 0
        found = checkpoints.load()
        assert checkpoints.damaged == []
        if found is not None:
            assert step_of(found) >= reached
            reached = found.step
    process.stdin.close()
    assert process.wait(30) == 0
    assert reached > 0
    assert partial > 0  # the kills did hit saves
    checkpoints.save(reached + 1, state(reached + 1), {"step": reached + 1})
    assert not [name for name in names(folder) if "." in name]


def test_killed_while_a_step_is_replaced(tmp_path):
    """Between the two renames there is no folder of that step: the old one is found under its other name."""
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(5, state(5), {"step": 5})
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.replaced")
    (tmp_path / "step-00000005.partial").mkdir()
    assert step_of(checkpoints.load()) == 5
    assert checkpoints.load().path.is_dir()
    again = Checkpoints(tmp_path, 2)
    again.save(6, state(6), {"step": 6})
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert step_of(again.load()) == 6


def test_killed_after_a_step_was_replaced(tmp_path):
    """Both are there: the newer one counts, but not if it is damaged."""
    checkpoints = Checkpoints(tmp_path, 1)
    for damage in (False, True):
        checkpoints.save(5, state(5), {"n": 0})
        shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-00000005.replaced")
        checkpoints.save(4, state(4), {})  # clears
        assert names(tmp_path) == ["step-00000004", "step-00000005"]
        shutil.copytree(tmp_path / "step-00000005", tmp_path / "older")
        checkpoints.save(5, state(5), {"n": 1})
        (tmp_path / "older").rename(tmp_path / "step-00000005.replaced")
        if damage:
            (tmp_path / "step-00000005" / "record.json").write_text("{}")
        assert checkpoints.load().record == {"n": 0 if damage else 1}
        checkpoints.save(5, state(5), {"n": 2})
        assert names(tmp_path) == ["step-00000005"]
        assert checkpoints.load().record == {"n": 2}


def test_leftovers_are_removed_at_the_next_save(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), {"step": 1})
    for name in ("step-00000002.partial", "step-00000000.removed"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert checkpoints.steps == [1]
    assert step_of(checkpoints.load()) == 1
    checkpoints.save(2, state(2), {"step": 2})
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
