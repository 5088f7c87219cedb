"""Tar shards as webdataset writes them, read in place with the standard library."""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgen.data.classes import number_classes
from driftgen.data.encoded_images import EncodedImages, Listing
from driftgen.data.locate import IMAGE_SUFFIXES, Place
from driftgen.errors import InputError
from driftgen.support.untrusted_files import parse_json, reading

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["list_shards", "open_shards"]

LABEL_KEYS = ("label", "class", "cls")  # of a .json
LABELS = ("cls", "json")
MAX_JSON = 10_000_000  # bytes
BLOCK = 512  # bytes of a tar header; data is padded to a multiple of it
MAGIC = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


def open_shards(place: Place, config: Data) -> EncodedImages:
    """Open the images of tar shards.

    The files of a sample have the same name up to the first dot of the base name: an image (``.jpg``,
    ``.png``, ``.webp`` ...), and its class in ``.cls`` (an integer) or ``.json`` (an integer or a name under
    ``label``, ``class`` or ``cls``). Other files are ignored. Without labels there is one class. Nothing is
    unpacked: workers read an image at its offset in the shard.
    """
    listing = list_shards(place.files, str(place.path), config.conditional)
    return EncodedImages(listing._replace(notes=[*place.notes, *listing.notes]), config)


def list_shards(files: Sequence[Path], where: str, conditional: bool = True) -> Listing:
    """Return the images of tar shards in the order of the archives, with their labels."""
    images: list[list[Any]] = []
    names: list[str] = []
    values: list[int | str | None] = []
    folders: set[str] = set()
    for path in files:
        for name, member, label in _samples(path, conditional):
            images.append([str(path), member.offset_data, member.size])
            names.append(f"{path}/{name}")
            folders.add(os.path.dirname(name))
            values.append(label)
    if not images:
        raise InputError(f"data.path={where}: no image in {len(files)} tar files, such as {files[0]}")
    whole = Listing(where, images, names, np.zeros(len(images), np.int64), ["all"])
    if not conditional:
        return whole
    if all(value is None for value in values):
        if len(folders) > 1:
            raise InputError(
                f"{files[0]} holds images in folders and no labels (.cls or .json): unpack it and name the "
                "folder, or set data.conditional=false"
            )
        return whole._replace(notes=[f"{where}: no labels (.cls or .json), all images are of one class"])
    labeled = [value for value in values if value is not None]
    if len(labeled) < len(values):
        missing = names[next(i for i, value in enumerate(values) if value is None)]
        raise InputError(f"{missing} has no label: add a .cls or .json file, or set data.conditional=false")
    if len({isinstance(value, str) for value in labeled}) > 1:
        kinds = {isinstance(value, str): name for value, name in zip(labeled, names, strict=True)}
        raise InputError(
            f"{kinds[False]} has a number as its label, {kinds[True]} a name: label all alike, or set "
            "data.conditional=false"
        )
    labels, class_names, notes = number_classes(labeled)
    return whole._replace(labels=labels, class_names=class_names, notes=notes)


def _samples(path: Path, conditional: bool) -> Iterator[tuple[str, tarfile.TarInfo, int | str | None]]:
    """Yield name, archive member and label of each image of a shard."""
    if not path.is_file():
        raise InputError(f"{path} is not a regular file: name tar files")
    with reading(path, "a tar file", "write it again"):
        _check_compression(path)
        with tarfile.open(path, "r:") as tar:
            samples = _group(path, tar)
            for key, parts in samples.items():
                pictures = [extension for extension in parts if f".{extension}" in IMAGE_SUFFIXES]
                if not pictures:
                    if "cls" in parts:
                        raise InputError(f"{path}: {key}.cls has no image beside it: remove it or add one")
                    continue
                if len(pictures) > 1:
                    raise InputError(
                        f"{path}: sample {key} has the images .{' and .'.join(pictures)}: one is expected"
                    )
                label = _read_label(path, tar, key, parts) if conditional else None
                yield parts[pictures[0]].name, parts[pictures[0]], label


def _check_compression(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(2)
    if start in MAGIC:
        raise InputError(
            f"{path} is compressed with {MAGIC[start]}: unpack it to a plain .tar, images cannot be read in "
            "place otherwise"
        )


def _group(path: Path, tar: tarfile.TarFile) -> dict[str, dict[str, tarfile.TarInfo]]:
    """Return the members of each sample by extension."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    end = 0
    for member in tar:
        end = member.offset_data + (-(-member.size // BLOCK) * BLOCK if member.isreg() else 0)
        folder, base = os.path.split(member.name)
        stem, dot, extension = base.partition(".")
        if member.isdir() or not dot or not stem:  # hidden files have no stem
            continue
        extension = extension.lower()
        if f".{extension}" not in IMAGE_SUFFIXES and extension not in LABELS:
            continue
        if not member.isreg() or member.issparse():
            kind = "sparse" if member.issparse() else "not a regular file"
            raise InputError(f"{path}: {member.name} is {kind}: shards must hold plain files")
        parts = samples.setdefault(os.path.join(folder, stem), {})
        if extension in parts:
            raise InputError(f"{path}: {member.name} occurs twice: keys must be unique in a shard")
        parts[extension] = member
    # tarfile takes a damaged header for the end of the archive.
    with path.open("rb") as file:
        file.seek(end)
        if any(file.read(BLOCK)):
            raise InputError(
                f"{path} is damaged at byte {end:,}, after {len(samples):,} samples: write it again"
            )
    return samples


def _read_label(
    path: Path, tar: tarfile.TarFile, key: str, parts: dict[str, tarfile.TarInfo]
) -> int | str | None:
    kind = next((extension for extension in LABELS if extension in parts), None)
    if kind is None:
        return None
    name = parts[kind].name
    if parts[kind].size > MAX_JSON:
        raise InputError(f"{path}: {name} has {parts[kind].size:,} bytes, a label is expected")
    stream = tar.extractfile(parts[kind])
    assert stream is not None
    text = stream.read().decode("utf-8", errors="replace").strip()
    if kind == "cls":
        if not re.fullmatch(r"\d{1,18}", text):
            raise InputError(f"{path}: {name} holds {text[:40]!r}, expected a class number 0, 1, ...")
        return int(text)
    try:
        record = parse_json(text, finite=False)
    except (ValueError, RecursionError):
        raise InputError(f"{path}: {name} is not valid JSON") from None
    if not isinstance(record, dict):
        raise InputError(f"{path}: {name} holds no JSON object, expected one with the key label")
    value = next((record[key] for key in LABEL_KEYS if record.get(key) is not None), None)
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(
            f"{path}: the label in {name} is {str(value)[:40]!r}, expected a class number or a name"
        )
    return value
