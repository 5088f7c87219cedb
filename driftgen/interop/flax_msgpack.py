"""Read and write Flax parameter files tensor by tensor, with msgpack only and without unpickling."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write
from driftgen.support.untrusted_files import open_regular, reading

__all__ = ["Stored", "index_parameters", "read_parameters", "write_parameters"]

NDARRAY, COMPLEX, SCALAR = 1, 2, 3  # flax's extension types
CHUNKED = "__msgpack_chunked_array__"
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
    "complex64": torch.complex64,
    "complex128": torch.complex128,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
# First byte of an extension: its length, or the number of bytes that encode the length.
FIXED = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4} | dict.fromkeys(FIXED, 0)
MAX_HEADER = 4096  # bytes of a name, or of the header of an array


@dataclass(frozen=True)
class Stored:
    """An array in a file, as a list of pieces (offset, bytes)."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    value: Tensor | None = None  # a complex scalar, which has its own encoding

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, memory: Tensor | None = None) -> Tensor:
        """Read the array into new memory, or into the beginning of a given uint8 buffer."""
        if self.value is not None:
            return self.value
        flat = torch.empty(self.size, dtype=torch.uint8) if memory is None else memory[: self.size]
        place: Any = memoryview(flat.numpy())  # type: ignore[arg-type]
        start = 0
        with reading(self.path, "parameters"), open_regular(self.path) as file:
            for offset, size in self.pieces:
                file.seek(offset)
                if file.readinto(place[start : start + size]) != size:
                    raise InputError(f"{self.path} changed while it was read; copy it again")
                start += size
        return flat.view(self.dtype).reshape(self.shape)


def index_parameters(path: Path) -> dict[str, Stored]:
    """Return every array of the file under its path, joined by "/", without reading the data."""
    with reading(path, "a flax parameter file"), open_regular(path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise InputError(f"{path} is empty")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                tree, _ = _Walk(path, data).value(0)
        except InputError as error:
            raise InputError(f"{path} is not a flax parameter file ({error})") from None
        except (msgpack.OutOfData, IndexError):
            raise InputError(f"{path} ends too early: it is truncated; copy it again") from None
        if not isinstance(tree, dict):
            raise InputError(f"{path} does not hold a tree of parameters")
        return dict(_flatten(tree, "", path))


def read_parameters(path: Path) -> dict[str, Tensor]:
    """Read every tensor of the file under its path, joined by "/"."""
    return {name: stored.read() for name, stored in index_parameters(path).items()}


def write_parameters(path: Path, parameters: dict[str, Tensor]) -> None:
    """Write tensors, named as by :func:`read_parameters`, in Flax's format and in the given order."""
    tree: dict[str, Any] = {}
    for name, tensor in parameters.items():
        *folders, leaf = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[leaf] = tensor
    with atomic_write(path) as scratch, scratch.open("wb") as file:
        _write(file, msgpack.Packer(strict_types=True), tree)


class _Walk:
    """Parser that skips the data of arrays: ``value(at)`` returns the value at an offset, and its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data = path, data

    def value(self, at: int) -> tuple[Any, int]:
        first = self.data[at]
        if first in EXTENSIONS:
            return self._array(at, EXTENSIONS[first])
        small = self._unpacker(at)
        if not (first & 0xF0 == 0x80 or first in (0xDE, 0xDF)):  # not a map
            return small.unpack(), at + small.tell()
        tree, entries = {}, small.read_map_header()
        at += small.tell()
        for _ in range(entries):
            name, at = self.value(at)
            tree[name if isinstance(name, str) else str(name)], at = self.value(at)
        return tree, at

    def _array(self, at: int, width: int) -> tuple[Stored, int]:
        """Parse an extension: first byte, length in ``width`` bytes (or implied by the first byte), type, and
        body (shape, dtype, bytes).
        """
        body = at + 2 + width
        length = int.from_bytes(self.data[at + 1 : at + 1 + width], "big") if width else FIXED[self.data[at]]
        end, code = body + length, self.data[body - 1]
        if end > len(self.data):
            raise msgpack.OutOfData
        if code not in (NDARRAY, COMPLEX, SCALAR):
            raise InputError(f"extension type {code} is not an array")
        head = self._unpacker(body)
        if code == COMPLEX:
            number = torch.tensor(complex(*head.unpack()), dtype=torch.complex128)
            return Stored(self.path, number.dtype, (), (), number), end
        if head.read_array_header() != 3:
            raise InputError("an array is not stored as shape, dtype and bytes")
        shape, name = head.unpack(), head.unpack()
        name = name.decode() if isinstance(name, bytes) else name
        if name not in DTYPES:
            raise InputError(f"dtype {name} is not supported")
        if not isinstance(shape, list) or not all(isinstance(n, int) and 0 <= n < 2**63 for n in shape):
            raise InputError(f"an array has the shape {str(shape)[:80]}")
        array = Stored(self.path, DTYPES[name], tuple(shape), ())
        # The rest of the extension is a byte string: a header of 2 to 5 bytes, then the data.
        rest = end - (body + head.tell())
        if not 2 <= rest - array.size <= 5:
            size = rest - (2 if rest < 2**8 + 2 else 3 if rest < 2**16 + 3 else 5)
            raise InputError(
                f"an array of shape {list(shape)} and dtype {name} has {size} bytes, expected {array.size}"
            )
        return replace(array, pieces=((end - array.size, array.size),)), end

    def _unpacker(self, at: int) -> msgpack.Unpacker:
        unpacker = msgpack.Unpacker(strict_map_key=False)
        unpacker.feed(self.data[at : at + MAX_HEADER])
        return unpacker


def _flatten(tree: dict[str, Any], prefix: str, path: Path) -> Iterator[tuple[str, Stored]]:
    for name, value in tree.items():
        if isinstance(value, dict) and CHUNKED in value:
            yield prefix + name, _join(value, path)
        elif isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/", path)
        elif isinstance(value, Stored):
            yield prefix + name, value
        else:
            raise InputError(f"{path}: {prefix}{name} is not an array but {type(value).__name__}")


def _join(chunked: dict[str, Any], path: Path) -> Stored:
    """Join the pieces of an array that Flax cut into chunks of at most 2^30 bytes."""
    shape = tuple(int(chunked["shape"][str(i)]) for i in range(len(chunked["shape"])))
    parts = [chunked["chunks"][str(i)] for i in range(len(chunked["chunks"]))]
    joined = Stored(path, parts[0].dtype, shape, tuple(piece for part in parts for piece in part.pieces))
    size = sum(part.size for part in parts)
    if size != joined.size or len({part.dtype for part in parts}) != 1:
        raise InputError(
            f"{path}: an array of shape {list(shape)} has chunks of {size} bytes, expected {joined.size} of "
            "one dtype"
        )
    return joined


def _write(file: Any, packer: msgpack.Packer, tree: dict[str, Any]) -> None:
    file.write(packer.pack_map_header(len(tree)))
    for name, value in tree.items():
        file.write(packer.pack(name))
        if isinstance(value, dict):
            _write(file, packer, value)
            continue
        array = value.detach().cpu().contiguous()
        raw = array.reshape(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b""
        body = msgpack.packb((list(array.shape), NAMES[array.dtype], raw), use_bin_type=True)
        file.write(msgpack.packb(msgpack.ExtType(NDARRAY, body)))
