"""Files of a latent cache: its shards, its index, and the identity that ties them together.

A cache is a folder of shards ``shard-00000.safetensors`` (``latents`` [n, 2, c, h, w], each image and its
flipped copy; ``labels`` [n]) and an index, ``cache.json``, which is written last.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from driftgen.errors import InputError

__all__ = ["AGAIN", "DTYPES", "INDEX", "ShardPlan", "one_line", "read_index"]

INDEX = "cache.json"
FORMAT, VERSION = "driftgen latents", 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AGAIN = "run driftgen encode again"


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
            with safe_open(path, framework="pt") as shard:
                identity = json.loads((shard.metadata() or {}).get("identity", "{}"))
                shapes = shard.get_slice("latents").get_shape(), shard.get_slice("labels").get_shape()
        except (OSError, ValueError, SafetensorError):
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


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check ``cache.json``."""
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if any(folder.glob("shard-*.safetensors")):
            raise InputError(f"{folder} is an incomplete latent cache: {AGAIN}") from None
        raise InputError(f"{folder} holds no latent cache: create one with driftgen encode") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {one_line(error)}; delete it and {AGAIN}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{path} is not the index of a latent cache: choose another folder")
    if index.get("version") != VERSION:
        raise InputError(f"{path} has version {index.get('version')!r}, expected {VERSION}: {AGAIN}")
    if not {"images", "latent_shape", "class_names", "tokenizer", "identity"} <= index.keys():
        raise InputError(f"{path} is damaged: delete it and {AGAIN}")
    return index


def one_line(error: Exception) -> str:
    """Return the message of an error as one line."""
    return " ".join(str(error).split())
