"""Damaged checkpoints: every changed byte is seen, and the last good one is found."""

import json
import random
import shutil

import pytest

from driftgen.training import checkpoint
from driftgen.training.checkpoint import Checkpoints
from tests.support.checkpoint_states import state, step_of

FILES = ["state.safetensors", "record.json", "checksum.json"]


@pytest.fixture
def two(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    return checkpoints


def passed_over(checkpoints, reason, good=1):
    assert step_of(checkpoints.load()) == good
    (line,) = checkpoints.damaged
    assert line == f"step-00000002 is damaged ({reason}): skipped (driftgen explain damaged-file)"


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_and_cut_is_seen(two, name):
    path = two.folder / "step-00000002" / name
    whole = path.read_bytes()
    chance = random.Random(0)
    size = len(whole)
    for _ in range(60):
        at, bit = chance.randrange(size), chance.randrange(8)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        assert step_of(two.load()) == 1
        assert len(two.damaged) == 1
    for length in {0, 1, 7, 8, 9, size // 2, size - 1, *(chance.randrange(size) for _ in range(10))}:
        path.write_bytes(whole[:length])
        assert step_of(two.load()) == 1
        assert len(two.damaged) == 1
    path.write_bytes(whole + b"\n1")
    assert step_of(two.load()) == 1
    path.write_bytes(whole)
    assert step_of(two.load()) == 2
    assert two.damaged == []


def test_damage_is_named(two):
    folder = two.folder / "step-00000002"
    for name in FILES:
        whole = (folder / name).read_bytes()
        (folder / name).unlink()
        passed_over(two, f"{name} is missing")
        (folder / name).write_bytes(whole[:-1])
        short = f"{name} has {len(whole) - 1} bytes, expected {len(whole)}"
        passed_over(two, "checksum.json cannot be read" if name == FILES[2] else short)
        if name != FILES[2]:
            (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            passed_over(two, f"checksum of {name} differs")
        (folder / name).write_bytes(whole)
    # The right sums of a file that is none.
    for name, reason in (("record.json", "Expecting value"), ("state.safetensors", "header")):
        whole = (folder / name).read_bytes()
        sums = json.loads((folder / "checksum.json").read_text())
        (folder / name).unlink()
        wrong = {**sums, name: checkpoint._write(folder / name, [b"xxxxxxxxxxxx"])}
        (folder / "checksum.json").write_text(json.dumps(wrong))
        assert step_of(two.load()) == 1
        assert reason.lower() in two.damaged[0].lower()
        assert "\n" not in two.damaged[0]
        (folder / name).write_bytes(whole)
        (folder / "checksum.json").write_text(json.dumps(sums))
    shutil.rmtree(folder)
    folder.mkdir()
    passed_over(two, "checksum.json is missing")


def test_all_damaged(two):
    for path in two.folder.glob("*/state.safetensors"):
        path.write_bytes(b"")
    assert two.load() is None
    assert [line.split()[0] for line in two.damaged] == ["step-00000002", "step-00000001"]


def test_a_damaged_one_counts_as_none(tmp_path):
    """Resumed before it, the run keeps as many good ones as it should, and replaces it in time."""
    checkpoints = Checkpoints(tmp_path, 2, 10)
    for step in (10, 20):
        checkpoints.save(step, state(step), {"step": step})
    (tmp_path / "step-00000020" / "record.json").unlink()
    again = Checkpoints(tmp_path, 1, 50)
    assert step_of(again.load()) == 10
    again.save(15, state(15), {"step": 15})
    assert again.steps == [15, 20]  # 15 is not dropped in favour of what cannot be read
    assert step_of(again.load()) == 15
    again.save(20, state(20), {"step": 20})
    assert step_of(again.load()) == 20
    assert (again.steps, again.damaged) == ([20], [])
    (tmp_path / "step-00000020" / "record.json").unlink()
    last = Checkpoints(tmp_path, 2)
    assert last.load() is None
    last.save(30, state(30), {"step": 30})
    assert last.steps == [30]
