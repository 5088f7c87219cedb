"""Read latents from the cache that ``driftgen encode`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from driftgen.data.classes import choose
from driftgen.data.latent_shards import AGAIN, CHECKSUMS, INDEX, ShardPlan, read_index, sample_checksums
from driftgen.errors import InputError
from driftgen.support.rng import derive_generator
from driftgen.support.untrusted_files import open_safetensors
from driftgen.support.user_paths import expand_user

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["LatentCache", "open_latents"]

COINS = 1024  # flips drawn from one generator


class LatentCache:
    """A latent cache as :class:`~driftgen.data.images.RealData`.

    Shards are memory-mapped only while the requested samples are copied, so memory use does not depend on the
    size of the cache.

    Args:
        folder: folder of the cache.
        flip: choose at random between the latent of an image and that of its flipped copy.

    Attributes:
        tokenizer: options of the tokenizer, for :func:`driftgen.tokenizers.build_tokenizer`.
    """

    decodes = True  # reading is slow enough to prefetch

    def __init__(self, folder: str | Path, flip: bool = True) -> None:
        self.folder, self.flip = expand_user(folder), flip
        index = read_index(self.folder)
        self.class_names: list[str] = index["class_names"]
        self.tokenizer: dict[str, Any] = index["tokenizer"]
        self.shape: tuple[int, int, int] = tuple(index["latent_shape"])
        self._plan = ShardPlan(self.folder, index["images"], self.shape, index["identity"])
        self._size = self._plan.shard_size
        labels = []
        for number in range(self._plan.shards):
            path = self._plan.path(number)
            if not self._plan.is_complete(number):
                raise InputError(f"{path} is missing or damaged: {AGAIN}", topic="damaged-file")
            with open_safetensors(path, "a shard of latents", AGAIN) as shard:
                labels.append(shard.get_tensor("labels").to(torch.int64, copy=True))
        self.labels = torch.cat(labels)
        if not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.class_names):
            raise InputError(f"{self.folder}: a label is no class of {INDEX}: {AGAIN}")
        self._stored_labels = self.labels
        self._verified = torch.zeros(len(self.labels), 2, dtype=torch.bool)
        self._chosen: Tensor | None = None

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """Load latents ``[len(indices), *shape]`` in float32.

        The flip of sample i of a call depends only on ``seed`` and ``first + i``.
        """
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self.labels):
            raise InputError(
                f"indices are {int(indices.min())} ... {int(indices.max())}, expected 0 ... "
                f"{len(self.labels) - 1}"
            )
        rows = indices if self._chosen is None else self._chosen[indices]
        flipped = self._draw_flips(seed, first, len(rows))
        out = torch.empty(len(rows), *self.shape)
        shards = rows // self._size
        order = shards.argsort(stable=True)
        shard_numbers, counts = torch.unique_consecutive(shards[order], return_counts=True)
        for number, where in zip(shard_numbers.tolist(), order.split(counts.tolist()), strict=True):
            path = self._plan.path(number)
            with open_safetensors(path, "a shard of latents", AGAIN) as shard:
                latents = shard.get_tensor("latents")  # memory-mapped
                samples = latents[rows[where] % self._size, flipped[where]]
                del latents
                self._verify(path, shard, rows[where], flipped[where], samples)
                out[where] = samples.float()
        return out

    def _verify(self, path: Path, shard: Any, rows: Tensor, flipped: Tensor, samples: Tensor) -> None:
        """Compare the checksum of each sample that is read for the first time."""
        new = ~self._verified[rows, flipped]
        if not new.any() or CHECKSUMS not in shard.keys():  # noqa: SIM118, not a mapping
            return
        rows, flipped = rows[new], flipped[new]
        stored = shard.get_tensor(CHECKSUMS)[rows % self._size, flipped]
        wrong = sample_checksums(samples[new], self._stored_labels[rows]) != stored
        if wrong.any():
            number = int(rows[wrong][0])
            raise InputError(
                f"{path} is damaged (checksum of sample {number}): delete it and {AGAIN}",
                topic="damaged-file",
            )
        self._verified[rows, flipped] = True

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _draw_flips(self, seed: int, first: int, n: int) -> Tensor:
        """Draw ``[n]`` flips: 1 selects the flipped copy.

        Flips are drawn in blocks because one generator per sample would cost more than reading the sample.
        """
        if not self.flip or not n:
            return torch.zeros(n, dtype=torch.int64)
        blocks = range(first // COINS, (first + n - 1) // COINS + 1)
        flips = [torch.randint(2, (COINS,), generator=derive_generator(seed, block)) for block in blocks]
        return torch.cat(flips)[first % COINS :][:n]


def open_latents(config: Data) -> LatentCache:
    """Open the cache at ``config.path`` and apply ``conditional`` and ``limit``."""
    if config.path is None:
        raise InputError("data.path is missing: set it to the folder that driftgen encode wrote")
    cache = LatentCache(config.path, flip=config.augment.flip)
    cache.labels, cache.class_names, chosen = choose(cache.labels.numpy(), cache.class_names, config)
    cache._chosen = torch.from_numpy(chosen)
    return cache
