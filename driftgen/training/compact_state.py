"""The state of a run in few files: a checkpoint with fewer bits per number, to carry between machines.

A folder with ``state.json`` (names, codecs and offsets of the tensors, and the record of the checkpoint),
``state-00001-of-00004.safetensors`` (their bytes, deflated), ``config.yaml`` of the run, and
``checksum.json`` (length and SHA-256 of the other files). Nothing in it is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_folder, atomic_write, make_folder
from driftgen.support.folder_lock import is_empty
from driftgen.support.sizes import parse_size, show_size
from driftgen.support.untrusted_files import parse_json, read_bytes, read_json, reading
from driftgen.training.checkpoint import Checkpoint, Checkpoints
from driftgen.training.run_folder import CHECKPOINTS, CONFIG, METRICS
from driftgen.training.state_encoding import LEVELS, Level, StateEncoder, decode_tensor, from_bytes
from driftgen.training.view import View

__all__ = ["CompactState", "StateReport", "place_state", "read_state", "write_state"]

STATE, CHECKSUM, FORMAT, VERSION = "state.json", "checksum.json", "driftgen-compact-state", 1
SHARD = re.compile(r"state-\d{5}-of-\d{5}\.safetensors")
BYTES = "bytes"  # the tensor of a shard
HEADER = 256  # bytes of a shard beside its tensor, at most
METRICS_ENTRY = "run/metrics"
DEFAULT_BITS = 24


@dataclass(frozen=True)
class StateReport:
    """The size of a compact state, and its error.

    Attributes:
        step: of the checkpoint.
        bits: per weight, see :data:`LEVELS`.
        size: bytes of all files.
        files: number of files.
        parts: bytes of each part.
        errors: root mean square error of weights and averages, relative to the root mean square weight.
        parameters: number of trained values.
    """

    step: int
    bits: int
    size: int
    files: int
    parts: dict[str, int]
    errors: dict[str, float]
    parameters: int


class CompactState(NamedTuple):
    """A compact state, decoded."""

    step: int
    tensors: dict[str, Tensor]
    record: dict[str, Any]
    config: str
    metrics: bytes


def write_state(
    run: str | Path,
    out: str | Path,
    *,
    bits: int | None = None,
    max_size: int | str | None = None,
    max_shard_size: int | str = "16MB",
    on_try: Callable[[str], None] = lambda text: None,
) -> StateReport:
    """Write the newest checkpoint of a run as a compact state.

    Args:
        run: folder of the run.
        out: folder of the state; a state in it is replaced when the new one is complete.
        bits: per weight: 32, 24, 16, 8 or 7. None takes the most that fit into ``max_size``, 24 without it.
        max_size: of all files, in bytes or as text such as ``"60MB"``.
        max_shard_size: of one file.
        on_try: called with one line for each number of bits that does not fit.
    """
    run, out = Path(run), Path(out)
    limit = math.inf if max_size is None else parse_size(max_size, "max_size")
    shard = parse_size(max_shard_size, "max_shard_size") - HEADER
    if shard < 2**10:
        raise InputError(f"max_shard_size={max_shard_size}: give at least 2KB")
    _check_target(out)
    checkpoint, config = _open_run(run)
    tensors = dict(checkpoint.tensors)
    if (run / METRICS).is_file():
        tensors[METRICS_ENTRY] = from_bytes(_rows_until(run / METRICS, checkpoint.step))
    smallest = ""
    for level in _levels(bits, max_size):
        encoder = StateEncoder(tensors, level)
        encoder.run()
        files = _files(encoder, checkpoint, level, config, shard)
        size = sum(len(content) for content in files.values())
        if size <= limit:
            _replace(out, files)
            parameters = sum(t.numel() for n, t in tensors.items() if n.endswith("/exp_avg"))
            parts = encoder.parts | {"index": size - len(encoder.payload)}
            return StateReport(
                checkpoint.step, level.bits, size, len(files), parts, encoder.errors(), parameters
            )
        smallest = f"{level.bits} bits per weight take {show_size(size)}"
        on_try(f"{smallest}, above {max_size}")
    raise InputError(
        f"max_size={max_size}: {smallest}; give more, keep fewer averages (ema), or save averaged weights "
        "alone with driftgen convert shards"
    )


def read_state(folder: str | Path) -> CompactState:
    """Read and check a compact state."""
    folder = Path(folder)
    contents = _checked_files(folder)
    with reading(folder, "a compact state"):
        index = parse_json(contents[STATE])
        if index["format"] != FORMAT or index["version"] != VERSION:
            raise InputError(f"{folder / STATE}: format {index['format']} {index['version']} is not known")
        payload = b"".join(load(contents[name])[BYTES].numpy().tobytes() for name in index["shards"])
        tensors, offset = dict[str, Tensor](), 0
        for entry in index["tensors"]:
            packed = payload[offset : offset + entry["bytes"]]
            offset += entry["bytes"]
            tensors[entry["name"]] = decode_tensor(entry, packed, tensors)
        metrics = tensors.pop(METRICS_ENTRY, torch.empty(0, dtype=torch.uint8))
        step, record = int(index["step"]), dict(index["record"])
        return CompactState(step, tensors, record, contents[CONFIG].decode(), metrics.numpy().tobytes())


def place_state(state: str | Path, folder: Path, view: View) -> None:
    """Write a compact state into the folder of a run as its checkpoint, unless the run has one.

    The loop then resumes from it. The same command can therefore start a run on a new machine and resume it
    after a kill.
    """
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    if checkpoints.steps:
        view.info(f"{folder} has a checkpoint: resuming it, state={state} is ignored")
        return
    if not is_empty(folder) and not (folder / CONFIG).is_file():
        raise InputError(f"{folder} is not empty and holds no run: use another --out")
    found = read_state(state)
    make_folder(folder)
    # The configuration first: a kill before the checkpoint is complete leaves a run without checkpoints.
    for name, content in ((CONFIG, found.config.encode()), (METRICS, found.metrics)):
        if content:
            with atomic_write(folder / name) as scratch:
                scratch.write_bytes(content)
    checkpoints.save(found.step, found.tensors, found.record)


def _levels(bits: int | None, max_size: int | str | None) -> Sequence[Level]:
    if bits is None:
        return LEVELS if max_size is not None else [level for level in LEVELS if level.bits == DEFAULT_BITS]
    chosen = [level for level in LEVELS if level.bits == bits]
    if not chosen:
        raise InputError(f"bits={bits}: choose from {', '.join(str(level.bits) for level in LEVELS)}")
    return chosen


def _open_run(run: Path) -> tuple[Checkpoint, bytes]:
    if not (run / CONFIG).is_file():
        raise InputError(f"{run} holds no run: {CONFIG} is missing")
    checkpoint = Checkpoints(run / CHECKPOINTS).load()
    if checkpoint is None:
        raise InputError(f"{run} has no checkpoint yet: train it first")
    return checkpoint, (run / CONFIG).read_bytes()


def _rows_until(metrics: Path, step: int) -> bytes:
    """Return the header of the metrics and the rows up to a step."""
    header, *rows = metrics.read_bytes().splitlines(keepends=True) or [b""]
    kept = []
    for row in rows:
        try:
            if int(json.loads(row)["step"]) <= step:
                kept.append(row)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue  # the last line of a killed run
    return header + b"".join(kept)


def _files(
    encoder: StateEncoder, checkpoint: Checkpoint, level: Level, config: bytes, shard: int
) -> dict[str, bytes]:
    """Return the contents of each file; the checksums come last."""
    payload = bytes(encoder.payload)
    pieces = [payload[i : i + shard] for i in range(0, len(payload), shard)]
    names = [f"state-{i + 1:05d}-of-{len(pieces):05d}.safetensors" for i in range(len(pieces))]
    index = {
        "format": FORMAT,
        "version": VERSION,
        "step": checkpoint.step,
        "codecs": level._asdict(),
        "shards": names,
        "record": checkpoint.record,
        "tensors": encoder.entries,
    }
    files = {name: save({BYTES: from_bytes(piece)}) for name, piece in zip(names, pieces, strict=True)}
    files[CONFIG] = config
    files[STATE] = json.dumps(index, separators=(",", ":"), allow_nan=False).encode()
    sums = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in files.items()}
    return files | {CHECKSUM: json.dumps(sums, indent=1).encode()}


def _check_target(out: Path) -> None:
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or (out / CHECKSUM).is_file())):
        raise InputError(f"{out} exists and holds no compact state: choose another folder")


def _replace(out: Path, files: Mapping[str, bytes]) -> None:
    """Write a complete folder, then let it take the place of the old one."""
    with atomic_folder(out) as scratch:
        for name, content in files.items():
            (scratch / name).write_bytes(content)


def _checked_files(folder: Path) -> dict[str, bytes]:
    if not (folder / CHECKSUM).exists():
        raise InputError(
            f"{folder} holds no compact state: {CHECKSUM} is missing; write one with driftgen convert state"
        )
    with reading(folder, "a compact state"):
        sums = read_json(folder / CHECKSUM, "checksums")
        names = [n for n in sums if n in (STATE, CONFIG) or SHARD.fullmatch(n)]
        contents = {name: read_bytes(folder / name) for name in names}
        wrong = [n for n in names if hashlib.sha256(contents[n]).hexdigest() != sums[n]["sha256"]]
    if wrong or STATE not in contents or CONFIG not in contents:
        raise InputError(
            f"{folder} is damaged (checksum of {wrong[0] if wrong else STATE}): copy it again",
            topic="damaged-file",
        )
    return contents
