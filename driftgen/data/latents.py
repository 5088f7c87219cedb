"""The latent cache: every image goes through the tokenizer once, and its flipped copy too.

A cache is a folder of shards ``shard-00000.safetensors`` (``latents`` [n, 2, c, h, w]: as it is and flipped;
``labels`` [n]) and ``cache.json``, which says what they are and comes last.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from driftgen.data.classes import choose
from driftgen.errors import InputError, unknown_name
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.rng import derive_generator

if TYPE_CHECKING:
    from driftgen.data.config import Data
    from driftgen.data.images import RealData
    from driftgen.tokenizers import Tokenizer

__all__ = ["LatentCache", "encode_images", "open_latents"]

INDEX, LOCK = "cache.json", "cache.lock"
FORMAT, VERSION = "driftgen latents", 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGAIN = "run driftgen encode again"
COINS = 1024  # flips that are drawn at once


class LatentCache:
    """The latents that :func:`encode_images` wrote, by number; :class:`~driftgen.data.images.RealData`.

    Shards are mapped into memory for as long as it takes to copy the samples asked for: a cache of any size
    takes no more memory than these.

    Args:
        folder: of the cache.
        flip: whether a coin chooses between the latent of an image and that of its flipped copy.

    Attributes:
        tokenizer: options of the tokenizer, for :func:`driftgen.tokenizers.build_tokenizer`.
    """

    decodes = True  # worth reading ahead

    def __init__(self, folder: str | Path, flip: bool = True) -> None:
        self.folder, self.flip = Path(folder).expanduser(), flip
        index = _read_index(self.folder)
        self.class_names: list[str] = index["class_names"]
        self.tokenizer: dict[str, Any] = index["tokenizer"]
        self.shape: tuple[int, int, int] = tuple(index["latent_shape"])
        self._plan = _Plan(self.folder, index["images"], self.shape, index["identity"])
        self._size = self._plan.shard_size
        labels = []
        for number in range(self._plan.shards):
            path = self._plan.path(number)
            if not self._plan.finished(number):
                raise InputError(f"{path} is missing or damaged: {AGAIN}")
            with safe_open(path, framework="pt") as shard:
                labels.append(shard.get_tensor("labels").clone())
        self.labels = torch.cat(labels)
        self._chosen: Tensor | None = None

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """Latents ``[len(indices), *shape]`` in float32; whether number i of a call is flipped depends on
        ``seed`` and ``first + i`` only.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.labels):
            raise InputError(f"indices must lie in 0 ... {len(self.labels) - 1}")
        rows = indices if self._chosen is None else self._chosen[indices]
        sides = self._sides(seed, first, len(rows))
        out = torch.empty(len(rows), *self.shape)
        shards = rows // self._size
        order = shards.argsort(stable=True)
        numbers, counts = torch.unique_consecutive(shards[order], return_counts=True)
        for number, where in zip(numbers.tolist(), order.split(counts.tolist()), strict=True):
            path = self._plan.path(number)
            try:
                with safe_open(path, framework="pt") as shard:
                    latents = shard.get_tensor("latents")  # mapped, not read
                    out[where] = latents[rows[where] % self._size, sides[where]].float()
                    del latents
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path} cannot be read any more: {_line(error)}") from None
        return out

    def close(self) -> None:
        """Nothing stays open."""

    def _sides(self, seed: int, first: int, n: int) -> Tensor:
        """1 for the flipped copy. Coins are tossed by the thousand: a generator for each would cost more than
        the reading.
        """
        if not self.flip or not n:
            return torch.zeros(n, dtype=torch.int64)
        blocks = range(first // COINS, (first + n - 1) // COINS + 1)
        tossed = [torch.randint(2, (COINS,), generator=derive_generator(seed, block)) for block in blocks]
        return torch.cat(tossed)[first % COINS :][:n]


def open_latents(config: Data) -> LatentCache:
    """The cache that a configuration names, with its ``conditional`` and ``limit``."""
    if config.path is None:
        raise InputError("data.path is missing: set it to the folder that driftgen encode wrote")
    cache = LatentCache(config.path)
    cache.labels, cache.class_names, kept = choose(cache.labels.numpy(), cache.class_names, config)
    cache._chosen = torch.from_numpy(kept)
    return cache


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
    """Builds a latent cache, or what is missing of it; how many shards are left to other processes.

    Process ``rank`` of ``world`` does every ``world``-th shard. The process that sees the last shard done
    writes the index. The posterior noise depends on ``seed``, the shard and the place in it, and is the same
    for the flipped copy.

    Args:
        data: images without augmentation.
        out: a folder; one of other images, another tokenizer or other options is refused.
        batch_size: images that are loaded and encoded at a time.
        shard_size: images of a shard.
        dtype: number type of the stored latents: float32, bfloat16 or float16.
        on_step: called with the images of this process that are done, and how many there are.
    """
    for name, value in (("batch_size", batch_size), ("shard_size", shard_size), ("world", world)):
        if value < 1:
            raise InputError(f"{name}={value} must be at least 1")
    if not 0 <= rank < world:
        raise InputError(f"rank={rank} must lie in 0 ... {world - 1}")
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    augment: Any = getattr(data, "augment", None)
    if augment is not None and augment != type(augment)():
        raise InputError("data.augment changes the images: leave it out to encode them as they are")
    (_, height, width), factor = data.shape, tokenizer.factor
    if height % factor or width % factor:
        raise InputError(f"images are {height}x{width} pixels: set data.size to a multiple of {factor}")
    shape = (tokenizer.latent_channels, height // factor, width // factor)
    options = json.dumps({"dtype": dtype, "seed": seed, "shard_size": shard_size})
    identity = {"data": _data_sum(data), "tokenizer": _tokenizer_sum(tokenizer), "options": options}
    plan = _Plan(make_folder(Path(out)), len(data.labels), shape, identity)
    plan.check_index()
    # All are looked at, so that a folder that belongs to others is refused before anything is written.
    done = {number for number in range(plan.shards) if plan.finished(number)}
    own = range(rank, plan.shards, world)
    total, count = sum(len(plan.rows(number)) for number in own), 0

    def progress(n: int) -> None:
        nonlocal count
        count += n
        if on_step is not None:
            on_step(count, total)

    with _locks(plan.folder / LOCK) as locked:
        for number in own:
            if number in done:
                progress(len(plan.rows(number)))
                continue
            with locked(number, False) as free:
                # Somebody who started the same command at the same time may have it, or have done it.
                if free and not plan.finished(number):
                    _encode_shard(data, tokenizer, plan, number, batch_size, progress)
        left = sum(not plan.finished(number) for number in range(plan.shards))
        if not left:
            record = plan.record(tokenizer.options(), data.class_names, data.shape)
            path = plan.folder / INDEX
            with locked(plan.shards, True), _room(path), atomic_write(path) as scratch:
                scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return left


@dataclass(frozen=True)
class _Plan:
    """Which image belongs where, and what a shard must say to be of this cache."""

    folder: Path
    images: int
    shape: tuple[int, int, int]
    identity: dict[str, str]

    @property
    def shard_size(self) -> int:
        return int(json.loads(self.identity["options"])["shard_size"])

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[json.loads(self.identity["options"])["dtype"]]

    @property
    def shards(self) -> int:
        return -(-self.images // self.shard_size)

    def path(self, number: int) -> Path:
        return self.folder / f"shard-{number:05d}.safetensors"

    def rows(self, number: int) -> range:
        return range(number * self.shard_size, min((number + 1) * self.shard_size, self.images))

    def finished(self, number: int) -> bool:
        """Whether the shard is there and whole; one of another cache is refused."""
        path = self.path(number)
        try:
            with safe_open(path, framework="pt") as shard:
                identity = json.loads((shard.metadata() or {}).get("identity", "{}"))
                found = shard.get_slice("latents").get_shape(), shard.get_slice("labels").get_shape()
        except (OSError, ValueError, SafetensorError):
            return False
        self._check(path, identity)
        n = len(self.rows(number))
        return found == ([n, 2, *self.shape], [n])

    def metadata(self) -> dict[str, str]:
        """What a shard says. One entry: safetensors writes several in any order, and shards would differ."""
        return {"identity": json.dumps(self.identity)}

    def check_index(self) -> None:
        """Refuses a folder whose index is that of another cache."""
        if (self.folder / INDEX).exists():
            self._check(self.folder / INDEX, _read_index(self.folder)["identity"])

    def record(
        self, tokenizer: dict[str, Any], names: list[str], shape: tuple[int, int, int]
    ) -> dict[str, Any]:
        """What ``cache.json`` holds."""
        shards = [
            {"file": self.path(number).name, "samples": len(self.rows(number))}
            for number in range(self.shards)
        ]
        return {
            "format": FORMAT,
            "version": VERSION,
            "images": self.images,
            "image_shape": list(shape),
            "latent_shape": list(self.shape),
            "tokenizer": tokenizer,
            "identity": self.identity,
            "class_names": names,
            "shards": shards,
        }

    def _check(self, path: Path, found: dict[str, str]) -> None:
        advice = "choose another folder, or delete this one"
        if found.get("data") != self.identity["data"]:
            raise InputError(f"{path} holds latents of other images: {advice}")
        if found.get("tokenizer") != self.identity["tokenizer"]:
            raise InputError(f"{path} was made by another tokenizer: {advice}")
        if found.get("options") != self.identity["options"]:
            raise InputError(
                f"{path} was made with other options, {found.get('options')}: use these, {advice}"
            )


def _encode_shard(
    data: RealData,
    tokenizer: Tokenizer,
    plan: _Plan,
    number: int,
    batch_size: int,
    progress: Callable[[int], None],
) -> None:
    rows = plan.rows(number)
    indices = torch.arange(rows.start, rows.stop)
    seed = int(json.loads(plan.identity["options"])["seed"])
    # Two that give the same: one for the images, one for their flipped copies.
    noise, again = derive_generator(seed, number), derive_generator(seed, number)
    latents = torch.empty(len(rows), 2, *plan.shape, dtype=plan.dtype)
    at = 0
    with ThreadPoolExecutor(1, thread_name_prefix="driftgen-load") as thread:
        parts = indices.split(batch_size)
        coming = thread.submit(data.load, parts[0], seed)
        for following in (*parts[1:], None):
            images = coming.result()
            if following is not None:
                coming = thread.submit(data.load, following, seed)
            stop = at + len(images)
            latents[at:stop, 0] = tokenizer.encode(images, noise)
            latents[at:stop, 1] = tokenizer.encode(images.flip(-1), again)
            at = stop
            progress(len(images))
    with _room(plan.path(number)), atomic_write(plan.path(number)) as scratch:
        save_file({"latents": latents, "labels": data.labels[indices]}, scratch, metadata=plan.metadata())
        with scratch.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _room(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} could not be written ({_line(error)}): make room and start again, finished shards stay"
        ) from None


@contextmanager
def _locks(path: Path) -> Iterator[Callable[[int, bool], Any]]:
    """Locks that end with the process that holds them: byte k of a file stands for shard k.

    Where there are none (Windows, some network disks) all is free, and two processes of one rank would do the
    same work twice.
    """
    try:
        import fcntl
    except ImportError:
        fcntl = None  # type: ignore[assignment]
    with path.open("ab") as file:

        @contextmanager
        def locked(number: int, wait: bool) -> Iterator[bool]:
            if fcntl is None:
                yield True
                return
            try:
                fcntl.lockf(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
            except OSError as error:
                yield error.errno not in (errno.EACCES, errno.EAGAIN)
                return
            try:
                yield True
            finally:
                fcntl.lockf(file, fcntl.LOCK_UN, 1, number)

        yield locked


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if any(folder.glob("shard-*.safetensors")):
            raise InputError(f"{folder} is a latent cache that is not finished: {AGAIN}") from None
        raise InputError(f"{folder} holds no latent cache: make one with driftgen encode") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {_line(error)}; delete it and {AGAIN}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{path} is not that of a latent cache: choose another folder")
    if index.get("version") != VERSION:
        raise InputError(f"{path} has version {index.get('version')!r}, expected {VERSION}: encode again")
    if not {"images", "latent_shape", "class_names", "tokenizer", "identity"} <= index.keys():
        raise InputError(f"{path} is damaged: delete it and {AGAIN}")
    return index


def _data_sum(data: RealData) -> str:
    """Which images these are: number, shape, classes, labels, and names of files or pixels."""
    paths, pixels = getattr(data, "paths", None), getattr(data, "pixels", None)
    what: Any = None
    if paths is not None:
        # Wherever the folder lies now.
        root = os.path.commonpath([os.path.dirname(path) for path in paths])
        what = [os.path.relpath(path, root) for path in paths]
    elif pixels is None:
        some = torch.linspace(0, len(data.labels) - 1, min(16, len(data.labels))).long()
        pixels = data.load(some, 0)
    digest = hashlib.sha256(json.dumps([list(data.shape), data.class_names, what]).encode())
    digest.update(_raw(data.labels))
    if pixels is not None:
        digest.update(_raw(pixels))
    return digest.hexdigest()


def _tokenizer_sum(tokenizer: Tokenizer) -> str:
    """Options and weights; how many images are encoded at a time makes no difference."""
    options = {
        name: value for name, value in tokenizer.options().items() if name not in ("batch_size", "source")
    }
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    if isinstance(tokenizer, nn.Module):
        for name, weight in tokenizer.state_dict().items():
            digest.update(f"{name} {list(weight.shape)}".encode())
            digest.update(_raw(weight))
    return digest.hexdigest()


def _raw(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
