"""Arrays of a zarr store, and the headers of Blosc chunks, checked before zarr decompresses them.

Blosc allocates by the sizes in the header of a chunk, and ends the process if it cannot have that much.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from driftgen.errors import InputError

__all__ = ["array_names", "check_chunks"]

HEADER = struct.Struct("<4x3I")  # version and flags; bytes of the chunk, of a block, and when compressed
FILTERED = 16  # most bytes per value after filters, which may widen a value


def array_names(path: Path) -> list[str]:
    """Return the arrays ``group/name`` of a store, from the names of its files.

    The listing of zarr opens all of them at once; if one is damaged, the errors of others are printed later.
    """
    if path.is_dir():
        files = [file.relative_to(path).as_posix() for file in path.glob("*/*/*")]
    else:
        with zipfile.ZipFile(path) as archive:
            files = archive.namelist()
    parts = (file.split("/") for file in files)
    return sorted({"/".join(p[:2]) for p in parts if len(p) == 3 and p[2] in (".zarray", "zarr.json")})


def check_chunks(path: Path, arrays: Mapping[str, Any]) -> None:
    """Raise an InputError for a chunk whose header does not fit its array.

    Args:
        path: a zarr folder or zip file.
        arrays: its arrays by their path inside.
    """
    for key, array in arrays.items():
        blosc = any("blosc" in type(codec).__name__.lower() for codec in array.compressors)
        if not blosc or array.shards is not None:
            continue
        values = math.prod(array.chunks)
        most = values * (FILTERED if array.filters else array.dtype.itemsize)
        for name, size, header in _headers(path, key):
            chunk, block, compressed = HEADER.unpack(header) if len(header) == HEADER.size else (0, 0, 0)
            if not (0 < block <= chunk <= most and HEADER.size <= compressed <= size):
                raise InputError(f"{name} is damaged (its header does not fit the array): copy it again")


def _headers(path: Path, key: str) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, size and first bytes of each chunk of an array."""
    if path.is_dir():
        for file in sorted(p for p in (path / key).rglob("*") if p.is_file() and not _is_metadata(p.name)):
            with file.open("rb") as opened:
                yield str(file), file.stat().st_size, opened.read(HEADER.size)
        return
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.is_dir() or not entry.filename.startswith(f"{key}/"):
                continue
            if not _is_metadata(Path(entry.filename).name):
                with archive.open(entry) as opened:
                    yield f"{path}: {entry.filename}", entry.file_size, opened.read(HEADER.size)


def _is_metadata(name: str) -> bool:
    return name == "zarr.json" or name.startswith(".z")
