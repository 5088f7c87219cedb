"""Reads and writes the parameter files of flax, tensor by tensor, with msgpack alone: nothing is ever
unpickled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.files import written_whole

__all__ = ["read_parameters", "write_parameters"]

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
LARGEST = 2**31 - 1


def read_parameters(path: Path) -> dict[str, Tensor]:
    """Every tensor of the file under its path of names, joined by "/".

    The file is streamed: beside the tensors themselves no more than the largest one is in memory at a time.
    """
    try:
        with path.open("rb") as file:
            unpacker = msgpack.Unpacker(
                file, ext_hook=_decode, strict_map_key=False, max_buffer_size=LARGEST, read_size=1 << 20
            )
            tree = unpacker.unpack()
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except msgpack.OutOfData:
        raise InputError(f"{path} ends too early: it is truncated; copy it again") from None
    except (msgpack.UnpackException, ValueError, TypeError, UnicodeDecodeError) as error:
        detail = f" ({error})" if isinstance(error, InputError) else ""
        raise InputError(f"{path} is not a flax parameter file{detail}") from None
    if not isinstance(tree, dict):
        raise InputError(f"{path} does not hold a tree of parameters")
    return dict(_flatten(tree, ""))


def write_parameters(path: Path, parameters: dict[str, Tensor]) -> None:
    """Writes tensors named like those of :func:`read_parameters` in flax's format; names keep their order."""
    tree: dict[str, Any] = {}
    for name, tensor in parameters.items():
        *folders, leaf = name.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[leaf] = tensor
    with written_whole(path) as scratch, scratch.open("wb") as file:
        _write(file, msgpack.Packer(strict_types=True), tree)


def _decode(code: int, data: bytes) -> Any:
    if code == COMPLEX:
        real, imaginary = msgpack.unpackb(data)
        return torch.tensor(complex(real, imaginary), dtype=torch.complex128)
    if code not in (NDARRAY, SCALAR):
        raise InputError(f"extension type {code} is no array of numbers")
    shape, name, buffer = msgpack.unpackb(data, strict_map_key=False)
    name = name.decode() if isinstance(name, bytes) else name
    if name not in DTYPES:
        raise InputError(f"numbers of type {name} are not known here")
    dtype = DTYPES[name]
    if len(buffer) != math.prod(shape) * dtype.itemsize:
        raise InputError(f"an array of shape {list(shape)} holds {len(buffer)} bytes")
    if not buffer:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(buffer), dtype=dtype).reshape(shape)


def _flatten(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Tensor]]:
    # Pops as it goes: a tensor that has been handed on is not held here as well.
    for name in list(tree):
        value = tree.pop(name)
        if isinstance(value, dict) and CHUNKED in value:
            yield prefix + str(name), _join(value)
        elif isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, Tensor):
            yield prefix + str(name), value
        else:
            raise InputError(f"{prefix}{name} is no array but {type(value).__name__}")


def _join(chunked: dict[str, Any]) -> Tensor:
    """One array of those that flax cuts into pieces of at most 2^30 bytes."""
    shape = [int(chunked["shape"][str(i)]) for i in range(len(chunked["shape"]))]
    pieces = [chunked["chunks"][str(i)] for i in range(len(chunked["chunks"]))]
    return torch.cat([piece.reshape(-1) for piece in pieces]).reshape(shape)


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
