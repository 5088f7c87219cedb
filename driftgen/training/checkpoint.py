"""Checkpoints: written atomically, verified when read.

A checkpoint is a folder ``step-00001000/`` with ``state.safetensors`` (tensors), ``record.json`` (other
values) and ``checksum.json`` (length and SHA-256 of both files).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from driftgen.errors import InputError, explained
from driftgen.support.untrusted_files import open_regular, read_bytes

__all__ = ["Checkpoint", "Checkpoints"]

STATE, RECORD, CHECKSUM = "state.safetensors", "record.json", "checksum.json"
# Suffixes of folders that are no valid checkpoints: being written, being removed, replaced by a newer one of
# the same step.
PARTIAL, REMOVED, REPLACED = ".partial", ".removed", ".replaced"
Chunks = Iterable[bytes | memoryview]
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass
class Checkpoint:
    """A loaded checkpoint.

    The tensors are memory-mapped copy-on-write: they take no memory until they are accessed, and in-place
    changes do not reach the file.
    """

    step: int
    path: Path
    tensors: dict[str, Tensor]
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. One process writes; any number may read.

    Args:
        folder: created by the first :meth:`save`.
        keep_last: number of newest checkpoints to keep.
        keep_every: also keep checkpoints of steps that are multiples of this number.

    Attributes:
        damaged: one line for each damaged checkpoint that the last :meth:`load` skipped.
    """

    def __init__(self, folder: str | Path, keep_last: int = 2, keep_every: int | None = None) -> None:
        if keep_last < 1:
            raise InputError(f"keep_last={keep_last} must be at least 1")
        if keep_every is not None and keep_every < 1:
            raise InputError(f"keep_every={keep_every} must be at least 1")
        self.folder, self.keep_last, self.keep_every = Path(folder), keep_last, keep_every
        self.damaged: list[str] = []
        self._bad: set[str] = set()

    @property
    def steps(self) -> list[int]:
        """Steps that have a checkpoint, valid or damaged, in ascending order."""
        return sorted(step for step, path in self._folders() if not path.suffix)

    def save(self, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
        """Write the checkpoint of a step, then remove those that the keep rules do not cover.

        Tensors are copied to the host one at a time, from any device. ``record`` is JSON, so tuples are
        loaded as lists.
        """
        if step < 0:
            raise InputError(f"step={step} must not be negative")
        header, order = _header(tensors)
        text = json.dumps(record, indent=1, allow_nan=False).encode()
        path = self.folder / f"step-{step:08d}"
        partial, replaced = (path.with_name(path.name + ending) for ending in (PARTIAL, REPLACED))
        with self._disk_errors(path.name):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._clear()
            try:
                partial.mkdir()
                state: Chunks = chain([header], (_bytes(tensors[name]) for name in order))
                sums = {STATE: _write(partial / STATE, state), RECORD: _write(partial / RECORD, [text])}
                _write(partial / CHECKSUM, [json.dumps(sums, indent=1).encode()])
                _sync(partial)
                if path.exists():
                    path.replace(replaced)
                partial.replace(path)
                _sync(self.folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        self._bad.discard(path.name)
        shutil.rmtree(replaced, ignore_errors=True)
        self._thin(step)
        return path

    def load(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, None if there is none. Changes nothing on disk."""
        self.damaged, self._bad = [], set()
        for step, path in sorted(self._folders(), key=lambda entry: (-entry[0], entry[1].name)):
            try:
                return Checkpoint(step, path, *_read(path))
            except _DamageError as damage:
                self._bad.add(path.name)
                self.damaged.append(explained(f"{path.name} is damaged ({damage}): skipped", "damaged-file"))
        return None

    def _folders(self) -> Iterator[tuple[int, Path]]:
        """Yield step and folder of each checkpoint, including those about to be replaced."""
        if self.folder.is_dir():
            for path in self.folder.iterdir():
                match = re.fullmatch(rf"step-(\d{{8,}})({re.escape(REPLACED)})?", path.name)
                if match and path.is_dir():
                    yield int(match[1]), path

    def _clear(self) -> None:
        """Remove leftovers of killed saves; of two checkpoints of a step keep the newer valid one."""
        for path in list(self.folder.glob("step-*")):
            if path.suffix in (PARTIAL, REMOVED):
                shutil.rmtree(path, ignore_errors=True)
            elif path.suffix == REPLACED:
                newer = path.with_suffix("")
                try:
                    _read(newer)
                    shutil.rmtree(path, ignore_errors=True)
                except _DamageError:
                    shutil.rmtree(newer, ignore_errors=True)
                    path.replace(newer)

    def _thin(self, newest: int) -> None:
        # Later steps can only be damaged ones that a resumed run has not reached again. They do not count,
        # and stay for inspection until the run overwrites them.
        past = {step: path for step, path in self._folders() if step <= newest and not path.suffix}
        good = sorted(step for step, path in past.items() if path.name not in self._bad)
        retained = set(good[-self.keep_last :])
        if self.keep_every is not None:
            retained |= {step for step in good if step % self.keep_every == 0}
        for step, path in past.items():
            if step not in retained:
                # Renamed first: a kill must not leave a partly deleted folder that looks like a checkpoint.
                removed = path.with_name(path.name + REMOVED)
                try:
                    path.replace(removed)
                except OSError:
                    continue  # disk space is lost, the run is not
                shutil.rmtree(removed, ignore_errors=True)

    @contextmanager
    def _disk_errors(self, name: str) -> Iterator[None]:
        """Turn an OSError into one line that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            last = [path for _, path in sorted(self._folders()) if path.name not in self._bad]
            still = f"the last good checkpoint is {last[-1]}" if last else "there is no earlier checkpoint"
            why = os.strerror(error.errno) if error.errno else str(error)
            if error.errno in FULL:
                message = (
                    f"the disk is full: {name} could not be written to {self.folder} ({why}); free space"
                )
            else:
                message = f"{name} could not be written to {self.folder}: {why}; check the disk"
            raise InputError(
                f"{message} and run the same command to resume; {still}", topic="disk-full"
            ) from None


class _DamageError(Exception):
    """A damaged checkpoint, with the reason in a few words."""


def _header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the header of a safetensors file and the order of the tensors after it.

    The writer of the safetensors library needs all tensors on the CPU at once, contiguous and without shared
    storage. The widest dtypes come first, so that each tensor is aligned to its element size.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise InputError(
                f"tensor {name!r} is {tensor.dtype}, {tensor.layout}: not supported in checkpoints"
            )
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, chunks: Chunks) -> dict[str, Any]:
    """Write and flush a file; return the length and checksum of the chunks."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk where the system supports it."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems flush files only
            raise
    finally:
        os.close(handle)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        sums = json.loads(read_bytes(path / CHECKSUM))
        expected = {name: (sums[name]["bytes"], sums[name]["sha256"]) for name in (STATE, RECORD)}
    except FileNotFoundError:
        raise _DamageError(f"{CHECKSUM} is missing") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise _DamageError(f"{CHECKSUM} cannot be read") from None
    try:
        # The small file first: the checksum of the large one takes seconds.
        for name in (RECORD, STATE):
            size, digest = expected[name]
            with open_regular(path / name) as file:
                actual = os.fstat(file.fileno()).st_size
                if actual != size:
                    raise _DamageError(f"{name} has {actual} bytes, expected {size}")
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    raise _DamageError(f"checksum of {name} differs")
        record = json.loads(read_bytes(path / RECORD))
        return load_file(path / STATE), record
    except FileNotFoundError as error:
        raise _DamageError(f"{Path(error.filename or STATE).name} is missing") from None
    except (_DamageError, MemoryError):  # a checkpoint that does not fit into memory is not damaged
        raise
    except Exception as error:
        raise _DamageError(f"it cannot be read, {' '.join(str(error).split())}") from None
