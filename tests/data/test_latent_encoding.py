"""Interrupted and distributed encoding, a full disk, and the memory use of reading."""

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import save_file

from driftgen.data.latent_encoding import encode_images
from driftgen.data.latents import LatentCache
from driftgen.tokenizers import Identity
from tests.support.fork_server import CAPTURE, run_code, start_code
from tests.support.helpers import fails
from tests.support.latent_images import SHARDS, Images, names

# --- resuming ---------------------------------------------------------------------------------------------


def test_complete_shards_are_not_encoded_again(tmp_path):
    class Failing(Identity):
        calls = 0

        def encode(self, images, generator=None):
            self.calls += 1
            if self.calls > 8:
                raise KeyboardInterrupt
            return super().encode(images, generator)

    data = Images()
    with pytest.raises(KeyboardInterrupt):
        encode_images(data, Failing(), tmp_path, batch_size=2, shard_size=5)
    assert names(tmp_path) == SHARDS[:1]
    fails(lambda: LatentCache(tmp_path), "is an incomplete latent cache: run driftgen encode again")
    data.loaded.clear()
    steps = []
    options = {"batch_size": 2, "shard_size": 5}
    encode_images(data, Identity(), tmp_path, on_step=lambda *step: steps.append(step), **options)
    probe = 16  # images loaded to identify the dataset
    assert data.loaded[probe:] == list(range(5, 23))
    assert steps[0] == (5, 23)
    data.loaded.clear()
    encode_images(data, Identity(), tmp_path, **options)
    assert data.loaded[probe:] == []
    # Only a truncated or missing shard is encoded again.
    whole = (tmp_path / SHARDS[2]).read_bytes()
    for cut in (whole[: len(whole) // 2], b"", None):
        if cut is None:
            (tmp_path / SHARDS[2]).unlink()
        else:
            (tmp_path / SHARDS[2]).write_bytes(cut)
        fails(lambda: LatentCache(tmp_path), f"{SHARDS[2]} is missing or damaged: run driftgen encode again")
        data.loaded.clear()
        encode_images(data, Identity(), tmp_path, **options)
        assert data.loaded[probe:] == list(range(10, 15))
        assert (tmp_path / SHARDS[2]).read_bytes() == whole
    assert len(LatentCache(tmp_path).labels) == 23


def test_each_process_encodes_its_shards(tmp_path):
    data = Images()
    assert encode_images(data, Identity(), tmp_path, shard_size=5, rank=1, world=2) == 3
    assert names(tmp_path) == [SHARDS[1], SHARDS[3]]
    assert encode_images(data, Identity(), tmp_path, shard_size=5, rank=1, world=2) == 3
    assert encode_images(data, Identity(), tmp_path, shard_size=5, rank=0, world=2) == 0
    assert "cache.json" in names(tmp_path)
    # More processes than shards, and a different number of processes than before.
    (tmp_path / "cache.json").unlink()
    assert encode_images(data, Identity(), tmp_path, shard_size=5, rank=8, world=9) == 0
    alone = tmp_path / "alone"
    encode_images(data, Identity(), alone, shard_size=5)
    for name in ["cache.json", *SHARDS]:
        assert (tmp_path / name).read_bytes() == (alone / name).read_bytes()


def test_what_a_killed_write_left_is_removed_once_all_shards_are_complete(tmp_path):
    """Not before: another process may still be writing."""
    scratch = tmp_path / ".partial-0123456789abcdef"
    scratch.mkdir()
    (scratch / SHARDS[0]).write_bytes(b"half a shard")
    data = Images()
    assert encode_images(data, Identity(), tmp_path, shard_size=5, rank=0, world=2) > 0
    assert scratch.exists()
    assert encode_images(data, Identity(), tmp_path, shard_size=5, rank=1, world=2) == 0
    assert not scratch.exists()


TOGETHER = """
import json, os, sys, time
from tests.support.latent_images import Images
from driftgen.data.latent_encoding import encode_images
from driftgen.tokenizers import Identity

class Slow(Identity):
    def encode(self, images, generator=None):
        time.sleep(0.01)
        return super().encode(images, generator)

def work(name, rank, world):
    data = Images(60)
    folder = os.path.join(sys.argv[1], name)
    encode_images(data, Slow(), folder, batch_size=2, shard_size=4, rank=rank, world=world)
    return len(data.loaded) - 16  # without those that identify the dataset

workers = []
for share in json.loads(sys.argv[2]):
    number = os.fork()
    if not number:
        os._exit(work(*share))
    workers.append(number)
print(json.dumps(workers), flush=True)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in workers]), flush=True)
"""


@pytest.mark.distributed
def test_concurrent_and_killed_processes(tmp_path):
    """Two ranks of which one is killed, and two processes of the same rank."""
    data = Images(60)
    encode_images(data, Identity(), tmp_path / "want", batch_size=2, shard_size=4)
    jobs = [("shares", 0, 2), ("shares", 1, 2), ("same", 0, 1), ("same", 0, 1)]
    process = start_code(TOGETHER, tmp_path, json.dumps(jobs), stdout=CAPTURE)
    numbers = json.loads(process.stdout.readline())
    shares, same = tmp_path / "shares", tmp_path / "same"
    while len(list(shares.glob("shard-?????.safetensors"))) < 4:
        assert process.poll() is None
        time.sleep(0.005)
    os.kill(numbers[1], signal.SIGKILL)
    codes = json.loads(process.stdout.readline())
    process.communicate()
    assert codes[:2] == [32, -signal.SIGKILL]
    fails(lambda: LatentCache(shares), "incomplete")
    assert encode_images(data, Identity(), shares, batch_size=2, shard_size=4) == 0
    # The locks kept the processes from encoding a shard twice.
    assert sum(codes[2:]) == 60
    assert min(codes[2:]) > 0
    for folder in (shares, same):
        assert names(folder) == names(tmp_path / "want")
        for path in (tmp_path / "want").glob("*s*"):
            assert (folder / path.name).read_bytes() == path.read_bytes()


def test_a_full_disk(tmp_path):
    code = """
import sys, resource
from tests.support.latent_images import Images
from driftgen.data.latent_encoding import encode_images
from driftgen.tokenizers import Identity
encode_images(Images(40, side=8), Identity(), sys.argv[1], shard_size=10, rank=0, world=2)
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    encode_images(Images(40, side=8), Identity(), sys.argv[1], shard_size=10)
except ValueError as error:
    print(type(error).__name__, error)
"""
    line = run_code(code, tmp_path).stdout
    assert line.startswith(f"InputError {tmp_path / SHARDS[1]} could not be written (")
    assert "File too large" in line
    assert line.endswith("free disk space, then run the same command to resume\n")
    assert names(tmp_path) == [SHARDS[0], SHARDS[2]]
    assert encode_images(Images(40, side=8), Identity(), tmp_path, shard_size=10) == 0


# --- memory -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_does_not_grow_with_the_cache(tmp_path):
    """Random reads from 400 MB in shards of 16 MB use the memory of a few shards and leave no file mapped."""
    n, size, shape = 12_800, 512, (4, 32, 32)
    first = encode_images(Images(size, side=4), Identity(), tmp_path / "small", shard_size=size)
    assert first == 0
    index = json.loads((tmp_path / "small" / "cache.json").read_text())
    index |= {"images": n, "latent_shape": shape, "class_names": [str(i) for i in range(n // size)]}
    (tmp_path / "cache.json").write_text(json.dumps(index))
    block = torch.zeros(size, 2, *shape)
    identity = {"identity": json.dumps(index["identity"])}
    for number in range(n // size):
        block += 1
        tensors = {"latents": block, "labels": torch.full((size,), number)}
        save_file(tensors, tmp_path / f"shard-{number:05d}.safetensors", metadata=identity)
    code = """
import sys, torch
from driftgen.data.latents import LatentCache

def memory():
    lines = dict(line.split(":") for line in open("/proc/self/status"))
    return {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile")}

torch.arange(1000)[torch.randperm(1000)].float().sum()
before = memory()
cache = LatentCache(sys.argv[1])
worst = {"RssAnon": 0, "RssFile": 0}
for step in range(60):
    indices = torch.randint(len(cache.labels), (256,))
    samples = cache.load(indices, step)
    assert torch.equal(samples[:, 3, 31, 31], cache.labels[indices] + 1.0)
    worst = {name: max(worst[name], value) for name, value in memory().items()}
print(*(round(worst[name] - before[name]) for name in worst))
"""
    done = run_code(code, tmp_path)
    assert done.returncode == 0, done.stderr
    own, mapped = map(int, done.stdout.split())
    assert own < 40
    assert mapped < 40
