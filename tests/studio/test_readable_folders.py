"""Paths that a page sends: only the folders of runs and of data can be read."""

import pytest

from driftgen.errors import InputError
from driftgen.studio.readable_folders import ReadableFolders


@pytest.fixture
def folders(tmp_path):
    for name in ("runs/a", "data/photos", "secret"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "key").write_text("key")
    return ReadableFolders(tmp_path / "runs", tmp_path / "data")


def test_paths_below_both_folders(folders):
    assert folders.run("a") == folders.runs / "a"
    assert folders.dataset("photos") == folders.data / "photos"
    assert folders.dataset(".").resolve() == folders.data.resolve()
    assert folders.dataset(str(folders.data / "photos")) == folders.data / "photos"
    assert folders.check_tree(folders.runs / "a") == folders.runs / "a"


@pytest.mark.parametrize(
    "name", ["..", "../secret", "a/../../secret", "/etc", "~", "/", "../runs2", "a/../.."]
)
def test_paths_elsewhere_are_refused(folders, name):
    (folders.runs.parent / "runs2").mkdir()
    for find in (folders.run, folders.dataset):
        with pytest.raises(InputError, match="is outside"):
            find(name)


@pytest.mark.parametrize("name", ["", " ", "\0", "x" * 5000])
def test_texts_that_are_no_paths(folders, name):
    with pytest.raises(InputError, match="no run is chosen"):
        folders.run(name)


@pytest.mark.parametrize("name", ["missing", "x" * 1000])
def test_missing_paths(folders, name):
    with pytest.raises(InputError, match="does not exist"):
        folders.run(name)


def test_links_count_by_their_target(folders):
    secret = folders.runs.parent / "secret"
    (folders.runs / "out").symlink_to(secret)
    (folders.runs / "a" / "model").symlink_to(secret / "key")
    (folders.runs / "within").symlink_to(folders.runs / "a")
    (folders.runs / "loop").symlink_to(folders.runs / "loop")
    assert folders.run("within")
    assert not folders.contains(folders.runs / "out" / "key")
    for name in ("out", "loop"):
        with pytest.raises(InputError):
            folders.run(name)
    with pytest.raises(InputError, match="model leads outside"):
        folders.check_tree(folders.runs / "a")
    assert folders.contains(secret / "key", [secret])
