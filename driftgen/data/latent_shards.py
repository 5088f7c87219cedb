"""Files of a latent cache: its shards, its index, and the identity that ties them together.

A cache is a folder of shards ``shard-00000.safetensors`` (``latents`` [n, 2, c, h, w], each image and its
flipped copy; ``labels`` [n]; ``checksums`` [n, 2], see :func:`sample_checksums`) and an index,
``cache.json``, which is written last.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ValidationError
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.config_base import Count
from driftgen.support.untrusted_files import open_safetensors, read_json, shown

__all__ = ["AGAIN", "CHECKSUMS", "DTYPES", "INDEX", "ShardPlan", "one_line", "read_index", "sample_checksums"]

INDEX = "cache.json"
FORMAT, VERSION = "driftgen latents", 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGAIN = "run driftgen encode again"
CHECKSUMS = "checksums"  # tensor of a shard; shards of earlier versions have none


@dataclass(frozen=True)
class ShardPlan:
    """Assignment of images to shards, and the identity that every shard of the cache must carry."""

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

    def is_complete(self, number: int) -> bool:
        """Return True if the shard exists and is complete; raise if it belongs to another cache."""
        path = self.path(number)
        try:
            with open_safetensors(path, "a shard of latents", AGAIN) as shard:
                identity = dict(json.loads((shard.metadata() or {}).get("identity", "{}")))
                shapes = shard.get_slice("latents").get_shape(), shard.get_slice("labels").get_shape()
        except InputError:
            return False
        self._check(path, identity)
        n = len(self.rows(number))
        return shapes == ([n, 2, *self.shape], [n])

    def metadata(self) -> dict[str, str]:
        """Return the metadata of a shard.

        A single entry, because safetensors writes several in arbitrary order and equal shards would differ.
        """
        return {"identity": json.dumps(self.identity)}

    def check_index(self) -> None:
        """Raise if the folder holds the index of another cache."""
        if (self.folder / INDEX).exists():
            self._check(self.folder / INDEX, read_index(self.folder)["identity"])

    def record(
        self, tokenizer: dict[str, Any], names: list[str], shape: tuple[int, int, int]
    ) -> dict[str, Any]:
        """Return the content of ``cache.json``."""
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

    def _check(self, path: Path, identity: dict[str, str]) -> None:
        advice = "choose another folder, or delete this one"
        if identity.get("data") != self.identity["data"]:
            raise InputError(f"{path} holds latents of other images: {advice}")
        if identity.get("tokenizer") != self.identity["tokenizer"]:
            raise InputError(f"{path} was written with another tokenizer: {advice}")
        if identity.get("options") != self.identity["options"]:
            raise InputError(
                f"{path} was written with other options, {identity.get('options')}: use these, {advice}"
            )


class _Identity(BaseModel):
    data: str
    tokenizer: str
    options: str


class _Options(BaseModel):
    shard_size: Count
    dtype: Literal["float32", "bfloat16", "float16"]
    seed: int = 0


class _Index(BaseModel):
    images: Count
    latent_shape: tuple[Count, Count, Count]
    class_names: list[str]
    tokenizer: dict[str, Any]
    identity: _Identity


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check ``cache.json``."""
    path = folder / INDEX
    if not path.exists():
        if any(folder.glob("shard-*.safetensors")):
            raise InputError(f"{folder} is an incomplete latent cache: {AGAIN}")
        raise InputError(f"{folder} holds no latent cache: create one with driftgen encode")
    index = read_json(path, "the index of a latent cache", f"delete it and {AGAIN}")
    if index.get("format") != FORMAT:
        raise InputError(f"{path} is not the index of a latent cache: choose another folder")
    if index.get("version") != VERSION:
        raise InputError(f"{path} has version {shown(index.get('version'))}, expected {VERSION}: {AGAIN}")
    try:
        index |= _Index.model_validate(index).model_dump()  # 6.0 and "6" become 6
        options = _Options.model_validate_json(index["identity"]["options"])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{path} is damaged ({where}: {first['msg']}): delete it and {AGAIN}") from None
    last = -(-index["images"] // options.shard_size) - 1
    if not (folder / f"shard-{last:05d}.safetensors").exists():  # before so many shards are looked for
        raise InputError(f"{folder} is an incomplete latent cache of {last + 1:,} shards: {AGAIN}")
    return index


def sample_checksums(latents: Tensor, labels: Tensor) -> Tensor:
    """Return a CRC-32 of each latent ``[n, ...]`` and its label, as int64 ``[n]``.

    Of each sample, so that only what is read needs to be verified.
    """
    rows = latents.contiguous().flatten(1).view(torch.uint8).numpy()
    sums = [zlib.crc32(row.data, label) for row, label in zip(rows, labels.tolist(), strict=True)]
    return torch.tensor(sums, dtype=torch.int64)


def one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split())
