"""A state dict as safetensors files: one ``model.safetensors``, or numbered shards and their index."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.atomic_write import honor_umask
from driftgen.support.int8_weights import SCALE, dequantize, quantize
from driftgen.support.untrusted_files import check_regular, open_regular, read_json, reading

__all__ = [
    "INDEX",
    "WEIGHTS",
    "check_files",
    "count_tensors",
    "file_checksum",
    "read_weights",
    "write_weights",
]

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
) -> dict[str, str]:
    """Write ``tensors`` into ``folder``, split into shards of at most ``max_shard_size``.

    Returns the SHA-256 of each file by name.

    ``dtype`` is that of the floating-point tensors in the file, or ``torch.int8`` for those of
    :func:`~driftgen.support.int8_weights.quantize`; their own if None.

    All new files are complete before any of them replaces an old one. Weight files of an earlier save that
    the new one does not use are deleted last.
    """
    from huggingface_hub import save_torch_state_dict

    with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder) as name:
        scratch = Path(name)
        try:
            save_torch_state_dict(_stored(tensors, dtype), scratch, max_shard_size=max_shard_size)
        except ValueError as error:
            raise InputError(
                f"max_shard_size={max_shard_size!r}: {error}; write a number of bytes, or text such as '5GB'"
            ) from None
        # The index comes last: it makes the shards the ones that are read.
        new = sorted(path.name for path in scratch.iterdir() if path.name != INDEX)
        sharded = (scratch / INDEX).is_file()
        ordered = [*new, INDEX] if sharded else new
        checksums = {file: file_checksum(scratch / file) for file in ordered}
        for file in ordered:
            honor_umask(scratch / file)
            (scratch / file).replace(folder / file)
    if not sharded:
        (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if (path.name == WEIGHTS or _SHARD.fullmatch(path.name)) and path.name not in new:
            path.unlink()
    return checksums


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file, at 1 to 2 GB/s on one core."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    """Compare files with their SHA-256, several at a time."""
    with ThreadPoolExecutor() as threads:
        for name, found in zip(checksums, threads.map(partial(_checksum_in, folder), checksums), strict=True):
            if found != checksums[name]:
                raise InputError(
                    f"{folder / name} is damaged (its checksum is not that of config.json): copy it again, "
                    "or skip the comparison with verify=False, --no-verify",
                    topic="damaged-file",
                )


def _checksum_in(folder: Path, name: str) -> str:
    with reading(folder / name, "weights"):
        return file_checksum(folder / name)


def count_tensors(folder: Path) -> int:
    """Return the number of tensors in the weight files of a folder."""
    if (folder / INDEX).is_file():
        files, aliases = _read_index(folder / INDEX)
        return sum(map(len, files.values())) + len(aliases)
    with ExitStack() as stack:
        file = stack.enter_context(_open(folder / WEIGHTS))
        return len(file.keys()) + len(file.metadata() or {})


def _stored(tensors: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    if dtype == torch.int8:
        tensors, dtype = quantize(tensors), None
    return {
        name: (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def read_weights(
    folder: Path,
    expected: Mapping[str, Tensor],
    obsolete: Collection[str] = (),
    checksums: Mapping[str, str] | None = None,
) -> dict[str, Tensor]:
    """Read the tensors named in ``expected``. Names and shapes must match exactly; dtypes are the file's.

    Weights of 8 bits become float32. Tensors named in ``obsolete`` are ignored unless expected. The files are
    compared with their ``checksums`` first, if there are any.
    """
    index = folder / INDEX
    files: Mapping[str, Sequence[str] | None] = {WEIGHTS: None}
    aliases: Mapping[str, str] = {}
    if index.is_file():
        files, aliases = _read_index(index)
    where = index if index.is_file() else folder / WEIGHTS
    if checksums:
        used = [*files, INDEX] if index.is_file() else [*files]
        if unknown := next((name for name in used if name not in checksums), None):
            raise InputError(f"{folder / unknown} has no checksum in config.json: copy the folder again")
        check_files(folder, {name: checksums[name] for name in used})
    with ExitStack() as stack:
        sources: dict[str, tuple[Any, str]] = {}  # tensor -> the open file and the name in that file
        for file, names in files.items():
            handle = stack.enter_context(_open(folder / file))
            stored = set(handle.keys())
            if names is not None and set(names) != stored:
                _refuse_names(folder / file, INDEX, stored, set(names))
            sources |= {name: (handle, name) for name in stored}
            if names is None:
                aliases = handle.metadata() or {}
        # Tensors that share memory are stored once, under one of their names.
        for name in expected.keys() - sources.keys():
            if aliases.get(name) in sources:
                sources[name] = sources[aliases[name]]
        for name in set(obsolete) - expected.keys():
            sources.pop(name, None)
        scales = {name: sources.pop(name + SCALE) for name in expected if name + SCALE in sources}
        if sources.keys() != expected.keys():
            _refuse_names(where, "config.json", set(sources), set(expected))
        state = {}
        for name, tensor in expected.items():
            handle, stored_name = sources[name]
            shape = list(handle.get_slice(stored_name).get_shape())
            if shape != list(tensor.shape):
                raise InputError(f"{where}: {name} has shape {shape}, expected {list(tensor.shape)}")
            with reading(where, "weights"):
                state[name] = handle.get_tensor(stored_name)
                if state[name].dtype == torch.int8 and tensor.is_floating_point() and name not in scales:
                    raise ValueError(f"{name} has 8 bits without its scales")
                if name in scales:
                    scale, scale_name = scales[name]
                    state[name] = dequantize(state[name], scale.get_tensor(scale_name))
        return state


def _open(path: Path) -> Any:
    with reading(path, "weights", "the folder is incomplete or damaged, copy it again"):
        return safe_open(check_regular(path), framework="pt")


def _read_index(path: Path) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the tensor names of each shard, and the stored name of each tensor that shares its memory."""
    with reading(path, "an index of weights"):
        record = read_json(path, "an index of weights")
        weight_map, metadata = record["weight_map"], record.get("metadata") or {}
        shards: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            # Only names of shards: an index must not point outside its folder.
            if not _SHARD.fullmatch(file):
                raise ValueError(f"{file!r} is not the name of a shard")
            shards.setdefault(file, []).append(name)
        return shards, {name: kept for name, kept in metadata.items() if isinstance(kept, str)}


def _refuse_names(path: Path, reference: str, stored: set[str], expected: set[str]) -> NoReturn:
    problems = [
        f"{problem}: {', '.join(sorted(names)[:5])}{' ...' if len(names) > 5 else ''}"
        for problem, names in (("unknown", stored - expected), ("missing", expected - stored))
        if names
    ]
    raise InputError(f"{path} does not fit {reference}; {'; '.join(problems)}")
