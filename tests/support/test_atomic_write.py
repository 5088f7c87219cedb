import os
import shutil
import stat
from pathlib import Path

import pytest

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_folder, atomic_write


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "metrics.json"
    with atomic_write(path) as scratch:
        scratch.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as scratch:  # noqa: PT012
        scratch.write_text("half of the ne")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["mkdir", "rmtree"])
def test_ctrl_c_leaves_no_scratch_folder(tmp_path, monkeypatch, place):
    """Right after the scratch folder is made, and while it is removed."""
    path, calls = tmp_path / "metrics.json", []
    make, remove = Path.mkdir, shutil.rmtree

    def mkdir(self, mode=0o777):
        make(self, mode)
        raise KeyboardInterrupt

    def rmtree(folder, ignore_errors):
        calls.append(folder)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(folder, ignore_errors)

    monkeypatch.setattr(*((Path, "mkdir", mkdir) if place == "mkdir" else (shutil, "rmtree", rmtree)))
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as scratch:
        scratch.write_text("new")
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == ([] if place == "mkdir" else [path])


def write_folder(path, text):
    with atomic_folder(path) as scratch:
        (scratch / "a").write_text(text)
        (scratch / "b").write_text(text)


def test_a_folder_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "runs" / "model"
    write_folder(path, "old")
    (path / "stray").write_text("of the old folder")
    with pytest.raises(RuntimeError), atomic_folder(path) as scratch:  # noqa: PT012
        (scratch / "a").write_text("new")
        raise RuntimeError
    assert {p.name: p.read_text() for p in path.iterdir()} == {
        "a": "old",
        "b": "old",
        "stray": "of the old folder",
    }
    write_folder(path, "new")
    assert {p.name: p.read_text() for p in path.iterdir()} == {"a": "new", "b": "new"}
    assert list(path.parent.iterdir()) == [path]


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    path = tmp_path / "model"
    write_folder(path, "old")
    path.replace(tmp_path / "model.replaced")
    with pytest.raises(RuntimeError), atomic_folder(path):
        raise RuntimeError
    assert (path / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def linked(kind, path, target):
    """Make a link to a folder or a file, or to a name that does not exist."""
    if kind == "folder":
        target.mkdir()
        (target / "a").write_text("outside")
    elif kind == "file":
        target.write_text("outside")
    path.symlink_to(target)


def outside(target):
    if target.is_dir():
        return {path.name: path.read_text() for path in target.iterdir()}
    return target.read_text() if target.exists() else None


@pytest.mark.parametrize("ending", ["", ".replaced", ".partial"])
@pytest.mark.parametrize("kind", ["folder", "file", "missing"])
def test_nothing_is_written_through_a_link_in_place_of_a_folder(tmp_path, kind, ending):
    run, target = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    linked(kind, run / f"model{ending}", target)
    before = outside(target)
    for text in ("first", "second"):
        write_folder(run / "model", text)
        assert not (run / "model").is_symlink()
        assert (run / "model" / "a").read_text() == text
    assert outside(target) == before
    assert {path.name for path in run.iterdir()} <= {"model", "model.partial"}


@pytest.mark.parametrize("name", ["report.html", "report.partial.html", "report.html.mode"])
@pytest.mark.parametrize("kind", ["file", "missing"])
def test_nothing_is_written_through_a_link_in_place_of_a_file(tmp_path, kind, name):
    run, target = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    linked(kind, run / name, target)
    before = outside(target)
    with atomic_write(run / "report.html") as scratch:
        os.close(os.open(scratch, os.O_CREAT, 0o600))  # private: its mode is set from a new file
        scratch.write_text("new")
    assert (run / "report.html").read_text() == "new"
    assert not (run / "report.html").is_symlink()
    assert outside(target) == before


def test_scratch_names_cannot_be_guessed_and_belong_to_this_user(tmp_path):
    seen = set()
    for _ in range(3):
        with atomic_write(tmp_path / "a.json") as scratch:
            seen.add(scratch)
            assert stat.S_IMODE(scratch.parent.stat().st_mode) == 0o700
            scratch.write_text("{}")
    assert len(seen) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_error_names_the_file_and_not_its_scratch(tmp_path):
    with pytest.raises(FileNotFoundError) as error, atomic_write(tmp_path / "missing" / "a.json"):
        pass
    assert error.value.filename == str(tmp_path / "missing" / "a.json")
    with pytest.raises(OSError, match=r"a\.json") as error, atomic_write(tmp_path / "a.json") as scratch:
        (scratch / "below").write_text("")  # the scratch file does not exist
    assert error.value.filename == str(tmp_path / "a.json")


@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_a_pipe_or_a_device_is_not_replaced(tmp_path, write):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="pipe is a device, a pipe or a socket"), write(pipe):
        pass
    assert pipe.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
