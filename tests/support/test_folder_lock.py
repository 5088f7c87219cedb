"""One process at a time holds a folder; the kernel releases the lock of a process that dies."""

import os
import socket
import sys

import pytest

from driftgen.errors import InputError
from driftgen.support import folder_lock
from driftgen.support.atomic_write import SCRATCH, check_free
from driftgen.support.folder_lock import LOCK, LockFile, check_not_held, hold_file, hold_folder, is_empty
from tests.support.held_folders import in_another_process

holder = pytest.fixture(in_another_process, name="holder")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def test_the_second_process_is_told_who_holds_the_folder(tmp_path, holder):
    start, kill = holder
    pid = start(hold_folder(tmp_path / "run"))
    for attempt in (hold_folder(tmp_path / "run").__enter__, lambda: check_not_held(tmp_path / "run")):
        with pytest.raises(InputError, match=f"in use by process {pid} on {socket.gethostname()} .since "):
            attempt()
    kill(pid)
    assert (tmp_path / "run" / LOCK).is_file()  # left by the killed process
    check_not_held(tmp_path / "run")
    with hold_folder(tmp_path / "run"):
        assert f'"pid": {os.getpid()}' in (tmp_path / "run" / LOCK).read_text()
    assert not (tmp_path / "run" / LOCK).exists()


def test_the_scratch_of_a_killed_holder_is_removed(tmp_path):
    for place in (tmp_path / ".partial-abc", tmp_path / "samples" / ".partial-def"):
        place.mkdir(parents=True)
        (place / "report.html").write_text("half")
    with hold_folder(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*")) == [LOCK, "samples"]


def test_a_folder_that_stays_empty_is_removed(tmp_path):
    with pytest.raises(RuntimeError), hold_folder(tmp_path / "runs" / "digits"):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with hold_folder(tmp_path / "runs" / "digits"):
        (tmp_path / "runs" / "digits" / "config.yaml").touch()
    assert [path.name for path in (tmp_path / "runs" / "digits").iterdir()] == ["config.yaml"]


def test_a_lock_counts_as_no_file(tmp_path):
    with hold_folder(tmp_path / "run"):
        assert is_empty(tmp_path / "run")
        (tmp_path / "run" / "note").touch()
        assert not is_empty(tmp_path / "run")
    assert is_empty(tmp_path / "missing")


def test_what_a_killed_write_left_counts_as_no_file(tmp_path):
    """A run that was killed while its first file was being written starts again in its folder."""
    (tmp_path / "run" / f"{SCRATCH}0123").mkdir(parents=True)
    (tmp_path / "run" / LOCK).touch()
    assert is_empty(tmp_path / "run")
    (tmp_path / "run" / LOCK).unlink()
    check_free(tmp_path / "run")
    (tmp_path / "run" / "note").touch()
    assert not is_empty(tmp_path / "run")
    with pytest.raises(InputError, match="not an empty folder"):
        check_free(tmp_path / "run")


def test_a_file_is_held_without_its_folder(tmp_path, holder):
    start, _ = holder
    start(hold_file(tmp_path / "a.safetensors"))
    with hold_file(tmp_path / "b.safetensors"), hold_folder(tmp_path):
        pass
    with pytest.raises(InputError, match=r"a\.safetensors is in use by process"):
        hold_file(tmp_path / "a.safetensors").__enter__()


def test_bytes_of_a_lock_file_are_separate_locks(tmp_path, holder):
    start, kill = holder
    pid = start(_TwoBytes(tmp_path / "cache.lock"))
    with LockFile(tmp_path / "cache.lock") as lock:
        assert [lock.acquire(number) for number in range(4)] == [True, False, True, False]
        kill(pid)
        assert lock.acquire(1)
        with lock.locked(3) as acquired:
            assert acquired


class _TwoBytes:
    def __init__(self, path):
        self.path = path

    def __enter__(self):
        self.lock = LockFile(self.path)
        assert self.lock.acquire(1)
        assert self.lock.acquire(3)

    def __exit__(self, *error):
        pass


def test_a_process_that_opened_a_removed_lock_file_takes_the_new_one(tmp_path):
    old = LockFile(tmp_path / LOCK)
    assert old.current
    (tmp_path / LOCK).unlink()
    assert not old.current
    with LockFile(tmp_path / LOCK) as new:
        assert not old.current
        assert new.current
    with old:
        pass


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_only_a_regular_file_is_a_lock(tmp_path, kind):
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").write_text("of somebody else")
    path = tmp_path / "run" / LOCK
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / ("outside" if kind == "link" else "missing"))
    with pytest.raises(InputError, match=r"driftgen\.lock is no regular file: remove it"):
        hold_folder(tmp_path / "run").__enter__()
    assert (tmp_path / "outside").read_text() == "of somebody else"
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": 1e999}', b'{"pid": {}}', b"\xff" * 5000])
def test_a_damaged_note_names_no_process(tmp_path, text):
    path = tmp_path / LOCK
    path.write_bytes(text)
    with LockFile(path) as lock:
        assert lock.holder() == "another process"


def test_a_system_without_locks_lets_every_process_pass(tmp_path, monkeypatch, holder):
    start, _ = holder
    start(hold_folder(tmp_path))

    def unsupported(*arguments):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", unsupported)
    with hold_folder(tmp_path):
        pass


def test_windows_locks_through_msvcrt(tmp_path, monkeypatch):
    class Msvcrt:
        LK_NBLCK, LK_UNLCK = 2, 0

        def __init__(self):
            self.locked = set()

        def locking(self, file, mode, count):
            position = os.lseek(file, 0, os.SEEK_CUR)
            if mode == self.LK_UNLCK:
                self.locked.remove(position)
            elif position in self.locked:
                raise PermissionError(13, "Permission denied")
            else:
                self.locked.add(position)

    monkeypatch.setattr(folder_lock, "fcntl", None)
    monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt())
    with LockFile(tmp_path / LOCK) as first, LockFile(tmp_path / LOCK) as second:
        assert first.acquire()
        first.describe()
        assert not second.acquire()
        assert second.holder().startswith(f"process {os.getpid()} on ")
        first.release()
        assert second.acquire()
