"""Encode a dataset once into a latent cache: every image and its flipped copy."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from driftgen.data.latent_shards import CHECKSUMS, DTYPES, INDEX, ShardPlan, one_line, sample_checksums
from driftgen.errors import InputError, unknown_name
from driftgen.support.atomic_write import atomic_write, make_folder, remove_scratch
from driftgen.support.folder_lock import LockFile
from driftgen.support.rng import derive_generator

if TYPE_CHECKING:
    from driftgen.data.images import RealData
    from driftgen.tokenizers import Tokenizer

__all__ = ["encode_images"]

LOCK = "cache.lock"


@torch.no_grad()
def encode_images(
    data: RealData,
    tokenizer: Tokenizer,
    out: str | Path,
    *,
    batch_size: int = 64,
    shard_size: int = 4096,
    dtype: str = "float32",
    seed: int = 0,
    rank: int = 0,
    world: int = 1,
    on_step: Callable[[int, int], None] | None = None,
) -> int:
    """Write a latent cache, or complete one; return the number of shards that other processes still encode.

    Process ``rank`` of ``world`` encodes every ``world``-th shard. The process that finds all shards complete
    writes the index. The posterior noise depends on ``seed``, the shard and the position in the shard. An
    image and its flipped copy share their noise.

    Args:
        data: images without augmentation.
        tokenizer: encodes the images.
        out: folder of the cache. A cache of other images, another tokenizer or other options is an error.
        batch_size: images loaded and encoded at a time.
        shard_size: images per shard.
        dtype: dtype of the stored latents: float32, bfloat16 or float16.
        seed: seed of the posterior noise.
        rank: rank of this process.
        world: number of processes.
        on_step: called with the number of images that this process has encoded, and its total.
    """
    for name, value in (("batch_size", batch_size), ("shard_size", shard_size), ("world", world)):
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    if not 0 <= rank < world:
        raise InputError(f"rank={rank} must be in 0 ... {world - 1}")
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    augment: Any = getattr(data, "augment", None)
    if augment is not None and augment != type(augment)():
        raise InputError("data.augment changes the images: remove it, the cache stores unaugmented images")
    (_, height, width), factor = data.shape, tokenizer.factor
    if height % factor or width % factor:
        raise InputError(f"images are {height}x{width} pixels: set data.size to a multiple of {factor}")
    shape = (tokenizer.latent_channels, height // factor, width // factor)
    options = json.dumps({"dtype": dtype, "seed": seed, "shard_size": shard_size})
    identity = {"data": _data_hash(data), "tokenizer": _tokenizer_hash(tokenizer), "options": options}
    plan = ShardPlan(make_folder(Path(out)), len(data.labels), shape, identity)
    plan.check_index()
    # Check all shards, so that a folder of another cache is rejected before anything is written.
    complete = {number for number in range(plan.shards) if plan.is_complete(number)}
    own = range(rank, plan.shards, world)
    total, count = sum(len(plan.rows(number)) for number in own), 0

    def progress(n: int) -> None:
        nonlocal count
        count += n
        if on_step is not None:
            on_step(count, total)

    # Byte k is the lock of shard k, the byte after them that of the index. Without file locks (some network
    # file systems) two processes of the same rank encode the same shards twice.
    with LockFile(plan.folder / LOCK) as lock:
        for number in own:
            if number in complete:
                progress(len(plan.rows(number)))
                continue
            with lock.locked(number) as acquired:
                # Another run of the same command may be encoding this shard, or have finished it meanwhile.
                if acquired and not plan.is_complete(number):
                    _encode_shard(data, tokenizer, plan, number, batch_size, progress)
        remaining = sum(not plan.is_complete(number) for number in range(plan.shards))
        if not remaining:
            record = plan.record(tokenizer.options(), data.class_names, data.shape)
            path = plan.folder / INDEX
            with lock.locked(plan.shards, wait=True), _write_errors(path):
                remove_scratch(plan.folder)  # of killed processes: all shards are complete, nobody writes one
                with atomic_write(path) as scratch:
                    text = json.dumps(record, indent=1, ensure_ascii=False)
                    scratch.write_text(f"{text}\n", encoding="utf-8")
    return remaining


def _encode_shard(
    data: RealData,
    tokenizer: Tokenizer,
    plan: ShardPlan,
    number: int,
    batch_size: int,
    progress: Callable[[int], None],
) -> None:
    rows = plan.rows(number)
    indices = torch.arange(rows.start, rows.stop)
    seed = int(json.loads(plan.identity["options"])["seed"])
    # Two equal generators: an image and its flipped copy get the same noise.
    noise, flipped_noise = derive_generator(seed, number), derive_generator(seed, number)
    latents = torch.empty(len(rows), 2, *plan.shape, dtype=plan.dtype)
    start = 0
    with ThreadPoolExecutor(1, thread_name_prefix="driftgen-load") as thread:
        batches = indices.split(batch_size)
        pending = thread.submit(data.load, batches[0], seed)
        for next_batch in (*batches[1:], None):
            images = pending.result()
            if next_batch is not None:
                pending = thread.submit(data.load, next_batch, seed)
            stop = start + len(images)
            latents[start:stop, 0] = tokenizer.encode(images, noise)
            latents[start:stop, 1] = tokenizer.encode(images.flip(-1), flipped_noise)
            start = stop
            progress(len(images))
    with _write_errors(plan.path(number)), atomic_write(plan.path(number)) as scratch:
        labels = data.labels[indices]
        checksums = torch.stack([sample_checksums(latents[:, flip], labels) for flip in (0, 1)], 1)
        tensors = {"latents": latents, "labels": labels, CHECKSUMS: checksums}
        save_file(tensors, scratch, metadata=plan.metadata())
        with scratch.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} could not be written ({one_line(error)}): free disk space, then run the same command "
            "to resume"
        ) from None


def _data_hash(data: RealData) -> str:
    """Hash the shape, class names and labels of the images, and their file names or pixels."""
    paths, pixels = getattr(data, "paths", None), getattr(data, "pixels", None)
    names: Any = None
    if paths is not None:
        # Relative paths, so that the folder can be moved.
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.relpath(path, root) for path in paths]
    elif pixels is None:
        probe = torch.linspace(0, len(data.labels) - 1, min(16, len(data.labels))).long()
        pixels = data.load(probe, 0)
    digest = hashlib.sha256(json.dumps([list(data.shape), data.class_names, names]).encode())
    digest.update(_raw_bytes(data.labels))
    if pixels is not None:
        digest.update(_raw_bytes(pixels))
    return digest.hexdigest()


def _tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash the weights and all options but those without effect on the latents (batch size, source)."""
    options = {
        name: value for name, value in tokenizer.options().items() if name not in ("batch_size", "source")
    }
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    if isinstance(tokenizer, nn.Module):
        for name, weight in tokenizer.state_dict().items():
            digest.update(f"{name} {list(weight.shape)}".encode())
            digest.update(_raw_bytes(weight))
    return digest.hexdigest()


def _raw_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
