import pytest

from driftgen.support.atomic_write import atomic_write


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "metrics.json"
    with atomic_write(path) as scratch:
        scratch.write_text("old")
    with pytest.raises(RuntimeError), atomic_write(path) as scratch:  # noqa: PT012
        scratch.write_text("half of the ne")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
