import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from driftgen.errors import InputError
from driftgen.training import checkpoint
from driftgen.training.checkpoint import Checkpoints

ROOT = Path(__file__).parents[1]


def state(step, size=1000):
    return {"weights": torch.full((size,), float(step)), "count": torch.full((3,), step)}


def step_of(found):
    """The step that the content was made of, which must be the same all over."""
    values = {float(x) for tensor in found.tensors.values() for x in tensor.unique()}
    assert values == {float(found.step)}
    assert found.record == {"step": found.step}
    return found.step


def fails(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def child(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=environment, **options)


# --- what goes in comes out -------------------------------------------------------------------------------


def test_tensors_come_back_bit_by_bit(tmp_path):
    base = torch.randn(6, 8)
    base[0, :3] = torch.tensor([float("nan"), float("inf"), -0.0])
    tensors = {
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "float64": base.double(),
        "int64": torch.tensor([-(2**63), 2**63 - 1, 0]),
        "int32": torch.tensor([-(2**31)], dtype=torch.int32),
        "int16": torch.tensor([-5, 7], dtype=torch.int16),
        "int8": torch.tensor([-128, 127, 1], dtype=torch.int8),
        "uint8": torch.arange(5, dtype=torch.uint8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3.25),
        "empty": torch.empty(0, 4),
        "empty bfloat16": torch.empty(2, 0, dtype=torch.bfloat16),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[0].expand(3, 8),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "shared a": base,
        "shared b": base.view(-1)[10:20],
        "parameter": torch.nn.Parameter(base[1]),
        'odd/name "with" ψ': torch.ones(1),
    }
    path = Checkpoints(tmp_path).save(7, tensors, {"a": [1, None, "ψ"], "b": {"c": 0.1}})
    found = Checkpoints(tmp_path).load()
    assert (found.step, found.path, found.record) == (7, path, {"a": [1, None, "ψ"], "b": {"c": 0.1}})
    assert found.tensors.keys() == tensors.keys()
    for name, want in tensors.items():
        got = found.tensors[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[want.element_size()]
        assert torch.equal(
            got.contiguous().view(width) if got.ndim else got,
            want.detach().contiguous().view(width) if want.ndim else want,
        ), name
    # Any reader of safetensors can open it, and finds each tensor at a multiple of its width.
    other = load_file(path / "state.safetensors")
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in other.values() if tensor.numel())


def test_what_is_loaded_can_be_changed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1), {"step": 1})
    checkpoints.load().tensors["weights"].add_(1)
    assert step_of(checkpoints.load()) == 1


def test_no_tensors_and_nothing_there(tmp_path):
    checkpoints = Checkpoints(tmp_path / "a" / "b")
    assert checkpoints.load() is None
    assert checkpoints.steps == checkpoints.damaged == []
    checkpoints.save(0, {}, {})
    found = checkpoints.load()
    assert (found.step, found.tensors, found.record) == (0, {}, {})


def test_wrong_input(tmp_path):
    fails(lambda: Checkpoints(tmp_path, 0), "^keep_last=0 must be at least 1")
    fails(lambda: Checkpoints(tmp_path, 1, 0), "^keep_every=0 must be at least 1")
    checkpoints = Checkpoints(tmp_path / "new")
    fails(lambda: checkpoints.save(-1, {}, {}), "^step=-1")
    fails(
        lambda: checkpoints.save(1, {"z": torch.zeros(1, dtype=torch.complex64)}, {}),
        "^tensor 'z' is torch.c",
    )
    fails(lambda: checkpoints.save(1, {"s": torch.eye(2).to_sparse()}, {}), "^tensor 's' is .*sparse")
    with pytest.raises(TypeError):
        checkpoints.save(1, {}, {"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        checkpoints.save(1, {}, {"a": float("nan")})
    # All before anything is written.
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    fails(
        lambda: Checkpoints(tmp_path / "file").save(1, {}, {}),
        "step-00000001 could not be written to .*no earlier",
    )


def test_saving_makes_no_second_copy(tmp_path):
    """128 MB of tensors that have to be copied first are saved within a few MB."""
    code = """
import resource, sys, torch
from driftgen.training.checkpoint import Checkpoints
tensors = {str(i): torch.ones(1 << 10, 1 << 10).t() for i in range(32)}
Checkpoints(sys.argv[1]).save(0, {"first": torch.ones(10)}, {})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
Checkpoints(sys.argv[1]).save(1, tensors, {})
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    process = child(code, tmp_path, stdout=subprocess.PIPE, text=True)
    grown = int(process.communicate()[0])
    assert process.returncode == 0
    assert grown < 20


# --- which ones stay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "every", "want"),
    [(1, None, [12]), (2, None, [11, 12]), (3, 4, [0, 4, 8, 10, 11, 12]), (20, None, list(range(13)))],
)
def test_keep_rules(tmp_path, last, every, want):
    checkpoints = Checkpoints(tmp_path, last, every)
    for step in range(13):
        path = checkpoints.save(step, state(step), {"step": step})
        assert path == tmp_path / f"step-{step:08d}"
    assert checkpoints.steps == want
    assert names(tmp_path) == [f"step-{step:08d}" for step in want]
    assert step_of(checkpoints.load()) == 12


def test_steps_of_more_than_eight_digits(tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    for step in (5, 99_999_999, 100_000_000):
        checkpoints.save(step, state(step, 1), {})
    assert checkpoints.steps == [99_999_999, 100_000_000]
    assert checkpoints.load().step == 100_000_000


def test_the_same_step_again(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, state(3), {"n": 1})
    real, seen = Path.replace, []

    def replace(self, target):
        seen.append(Checkpoints(tmp_path).load().record["n"])
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    checkpoints.save(3, state(3), {"n": 2})
    assert seen == [1, 1]  # at no moment is there none
    assert names(tmp_path) == ["step-00000003"]
    assert checkpoints.load().record == {"n": 2}


def test_what_is_not_ours_stays(tmp_path):
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000009").write_text("a file")
    (tmp_path / "best").mkdir()
    checkpoints = Checkpoints(tmp_path, 1)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    assert names(tmp_path) == ["best", "step-00000002", "step-00000009", "step-notes"]
    assert step_of(checkpoints.load()) == 2


# --- damage -----------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, state(step), {"step": step})
    return checkpoints


def passed_over(checkpoints, reason, good=1):
    assert step_of(checkpoints.load()) == good
    (line,) = checkpoints.damaged
    assert line == f"step-00000002 is damaged ({reason}): passed over"


FILES = ["state.safetensors", "record.json", "checksum.json"]


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
        short = f"{name} has {len(whole) - 1} bytes instead of {len(whole)}"
        passed_over(two, "checksum.json cannot be read" if name == FILES[2] else short)
        if name != FILES[2]:
            (folder / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
            passed_over(two, f"checksum of {name} differs")
        (folder / name).write_bytes(whole)
    # The right sums of a file that is none.
    for name, reason in (("record.json", "Expecting value"), ("state.safetensors", "header")):
        whole = (folder / name).read_bytes()
        sums = json.loads((folder / "checksum.json").read_text())
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
    process = child(FILL, tmp_path, 50_000, stdout=subprocess.PIPE, text=True)
    lines = process.communicate()[0].splitlines()
    last = tmp_path / "step-00000001"
    assert lines == [
        f"the disk is full: step-00000002 could not be written to {tmp_path} (File too large); make room and "
        f"start again; the last good checkpoint is {last}",
        "['step-00000001']",
        "1 {1.0} {'step': 1} []",
    ]


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
    assert "(No space left on device); make room" in message
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

    The child imports torch once and forks: an import each would take a minute.
    """
    chance = random.Random(times)
    folder = tmp_path / "checkpoints"
    process = child(LOOP, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        checkpoints.save(5, state(5), {"n": 1})
        shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-00000005.replaced")
        checkpoints.save(4, state(4), {})  # clears
        assert names(tmp_path) == ["step-00000004", "step-00000005"]
        shutil.copytree(tmp_path / "step-00000005", tmp_path / "step-00000005.replaced")
        if damage:
            (tmp_path / "step-00000005" / "record.json").write_text("{}")
        assert checkpoints.load().record == {"n": 1}
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
