import hashlib

from driftgen.support.checksum import files_checksum, weights_checksum


def test_one_file_has_its_own_checksum(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("not weights")
    assert weights_checksum(tmp_path) == hashlib.sha256(b"weights").hexdigest()


def test_any_change_of_a_shard_changes_the_checksum(tmp_path):
    a, b = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    a.write_bytes(b"1")
    b.write_bytes(b"2")
    before = weights_checksum(tmp_path)
    assert before == files_checksum(b, a)
    b.write_bytes(b"3")
    assert weights_checksum(tmp_path) != before
