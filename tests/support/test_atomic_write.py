import pytest

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
    (tmp_path / "model.partial").mkdir()
    with pytest.raises(RuntimeError), atomic_folder(path):
        raise RuntimeError
    assert (path / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
