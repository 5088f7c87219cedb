"""Benchmark results: a table that fits 80 columns, and a JSON record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import driftgen
from driftgen.bench.cards import Card, Release
from driftgen.bench.clock import Timing
from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write, check_replaceable
from driftgen.support.provenance import provenance

__all__ = ["Floor", "Row", "check_json", "least_time", "machine", "make_record", "show_rows", "write_json"]


@dataclass(frozen=True)
class Floor:
    """Lower bound of the time: all bytes moved once and all operations, at the card's peak rates.

    Seconds are None if the peak rate is not known.
    """

    bytes: float
    operations: float
    seconds_by_bytes: float | None = None
    seconds_by_operations: float | None = None

    @property
    def seconds(self) -> float | None:
        """Return the larger of the two bounds."""
        known = [s for s in (self.seconds_by_bytes, self.seconds_by_operations) if s is not None]
        return max(known, default=None)


def least_time(
    card: Card | None, *, moved: float, operations: float, dtype: torch.dtype, fp8: bool = False
) -> Floor:
    """Return the floor of work that moves ``moved`` bytes and does ``operations`` in ``dtype``, or in fp8."""
    if card is None:
        return Floor(moved, operations)
    # The known peak is that of 16-bit products; that of float32 was not measured.
    peak = card.fp8_operations if fp8 else card.operations if dtype.itemsize == 2 else None
    return Floor(moved, operations, moved / card.bytes, None if peak is None else operations / peak)


@dataclass(frozen=True)
class Row:
    """One measurement and its references.

    Attributes:
        what: the case.
        detail: options of the run.
        timing: our time; None if out of memory.
        references: other implementations measured in the same run; None for one that is out of memory.
        release: the authors' code on the same card, if known.
        floor: lower bound of the time.
        held_bytes: bytes allocated before the first call that belong to the work; the peak includes them.
        least_bytes: bytes of inputs and outputs, to compare the peak with.
        images: samples per call.
        pairs: pairs of samples that a call compares, times their width.
        pair_reference: seconds for each of ``pairs`` of a reference of the same run.
        more: further entries of the record.
    """

    what: str
    detail: str
    timing: Timing | None
    references: Mapping[str, Timing | None] = field(default_factory=dict)
    release: Release | None = None
    floor: Floor | None = None
    held_bytes: int = 0
    least_bytes: int | None = None
    images: int | None = None
    pairs: float | None = None
    pair_reference: float | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pair_seconds(self) -> float | None:
        """Time for each of ``pairs``, of queued calls if known."""
        ours = self.timing
        return None if ours is None else _ratio(ours.queued_seconds or ours.seconds, self.pairs)

    def as_record(self) -> dict[str, Any]:
        """Return all figures for the JSON record.

        ``ratio`` of a reference is its time over ours (above 1: ours is faster); that of the floor is our
        time over the floor, and ``pair_ratio`` our time for each pair over that of the reference.
        """
        ours = self.timing
        record: dict[str, Any] = {"what": self.what, "detail": self.detail, "fits": ours is not None}
        if ours is not None:
            record |= self._figures(ours)
            record["peak_ratio"] = _ratio(record["peak_bytes"], self.least_bytes)
            if self.images:
                record["images_per_second"] = self.images / (ours.queued_seconds or ours.seconds)
        if self.pairs:
            record["pair_seconds"] = self.pair_seconds
            record["pair_ratio"] = _ratio(self.pair_seconds, self.pair_reference)
        seconds, peak = record.get("seconds"), record.get("peak_bytes")
        record["references"] = {
            name: timing and self._figures(timing) | {"ratio": _ratio(timing.seconds, seconds)}
            for name, timing in self.references.items()
        }
        record["release"] = self.release and {
            "seconds": self.release.seconds,
            "ratio": _ratio(self.release.seconds, seconds),
            "peak_bytes": self.release.peak_bytes,
            "peak_ratio": _ratio(self.release.peak_bytes, peak),
        }
        record["floor"] = self.floor and {
            "bytes": self.floor.bytes,
            "operations": self.floor.operations,
            "seconds_by_bytes": self.floor.seconds_by_bytes,
            "seconds_by_operations": self.floor.seconds_by_operations,
            "seconds": self.floor.seconds,
            "ratio": _ratio(seconds, self.floor.seconds),
        }
        return record | dict(self.more)

    def _figures(self, timing: Timing) -> dict[str, Any]:
        return {
            "seconds": timing.seconds,
            "best_seconds": timing.best,
            "queued_seconds": timing.queued_seconds,
            "first_call_seconds": timing.first_call_seconds,
            "peak_bytes": None if timing.peak_bytes is None else timing.peak_bytes + self.held_bytes,
        }


def machine(device: torch.device) -> str:
    """Return hardware and versions in one line."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else provenance("")["hardware"]
    return f"{name}, torch {torch.__version__}, driftgen {driftgen.__version__}"


def make_record(
    command: str, arguments: Mapping[str, Any], device: torch.device, rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the record of a run: rows, command, hardware and versions."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    about = {"gpu": gpu, "cuda": torch.version.cuda, "arguments": dict(arguments)}
    evaluator = (
        "median of the repeats, 0.1 s of them at least, after a first call and a warm-up; "
        "peak memory with what was held"
    )
    return {**provenance(command), **about, "evaluator": evaluator, "rows": list(rows)}


def show_rows(rows: Sequence[Row], title: str, console: Console | None = None) -> None:
    """Print each row on two lines: figures, and their ratios below."""
    records = [row.as_record() for row in rows]
    names = list(dict.fromkeys(name for record in records for name in record["references"]))
    release = any(record["release"] for record in records)
    floor = any(record["floor"] and record["floor"]["seconds"] for record in records)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    pairs = any(record.get("pair_ratio") for record in records)
    columns = ["ours", *names, *["release"] * release, *["floor"] * floor]
    columns += [*["per pair"] * pairs, "peak", "cold"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for record in records:
        cells = [_ours(record), *(_reference(record, name) for name in names)]
        if release:
            cells.append(_pair(record["release"]))
        if floor:
            cells.append(_pair(record["floor"]))
        if pairs:
            cells.append(_cell(_per_pair(record.get("pair_seconds")), _times(record.get("pair_ratio"))))
        cells.append(_cell(_memory(record.get("peak_bytes")), _times(record.get("peak_ratio"))))
        cells.append(_cell(_duration(record.get("first_call_seconds"))))
        table.add_row(_cell(escape(record["what"]), escape(record["detail"])), *cells)
    console = console or Console()
    console.print(f"[bold]{escape(title)}[/]", highlight=False)
    console.print(table)
    notes = ["Second line: reference over ours" if names or release else "Second line"]
    notes += ["ours over floor"] if floor else []
    notes += ["time per pair and element over that of 64/64/16"] if pairs else []
    notes += ["peak over inputs + outputs"] if any(row.least_bytes for row in rows) else []
    notes += ["samples per second"] if any(row.images for row in rows) else []
    console.print(f"[dim]{', '.join(notes)}. Cold: first call.[/]", width=min(console.width, 80))


def check_json(path: Path | None) -> None:
    """Raise an InputError if ``path`` cannot be written, before anything is measured."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InputError(f"json={path} is a folder: give a file, such as {path / 'bench.json'}")
        check_replaceable(path)
        with atomic_write(path.with_name(f"{path.name}.try")) as scratch:
            scratch.touch()
        path.with_name(f"{path.name}.try").unlink()
    except OSError as error:
        raise InputError(f"cannot write json={path}: {error.strerror}; choose another file") from None


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write the record to a file."""
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _ours(record: Mapping[str, Any]) -> str:
    if not record["fits"]:
        return _cell("OOM")
    rate = record.get("images_per_second")
    return _cell(f"[bold]{_duration(record['seconds'])}[/]", "" if rate is None else _rate(rate))


def _reference(record: Mapping[str, Any], name: str) -> str:
    if name not in record["references"]:
        return ""
    figures = record["references"][name]
    return _cell("OOM") if figures is None else _pair(figures)


def _pair(figures: Mapping[str, Any] | None) -> str:
    return "" if figures is None else _cell(_duration(figures["seconds"]), _times(figures["ratio"]))


def _cell(above: str, below: str = "") -> str:
    return f"{above}\n[dim]{below}[/]"


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.3g}x"


def _rate(rate: float) -> str:
    """Format with three digits: 1,020/s."""
    return f"{float(f'{rate:.3g}'):,.0f}/s" if rate >= 100 else f"{rate:.3g}/s"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return ""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _per_pair(seconds: float | None) -> str:
    """Format with three digits: 81.2 fs on a GPU, 7.69 ns on a CPU."""
    if seconds is None:
        return ""
    power, unit = next(((p, u) for p, u in ((9, "ns"), (12, "ps")) if seconds * 10**p >= 1), (15, "fs"))
    return f"{seconds * 10**power:.3g} {unit}"


def _memory(size: float | None) -> str:
    if size is None:
        return ""
    power, unit = next(((p, u) for p, u in ((30, "GiB"), (20, "MiB")) if size >= 2**p), (10, "KiB"))
    return f"{size / 2**power:.{0 if size >= 10 * 2**power else 1}f} {unit}"
