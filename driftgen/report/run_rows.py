"""Rows of ``metrics.jsonl`` for a page: checked, and at most as many as a page needs.

A report is written again and again while its run continues: reading every row into memory would take more of
it with every step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from driftgen.support.untrusted_files import parse_json

__all__ = ["MOST_ROWS", "Rows", "read_rows"]

MOST_ROWS = 600  # twice the points of a curve
LONGEST_LINE = 2**24  # bytes
LARGEST_STEP = 2**63
# Types of the fields that pages read; other fields may have any.
NUMBERS = (
    *("seconds", "samples_per_second", "memory_gib", "loss", "learning_rate", "gradient_norm", "skipped"),
    *("alpha", "spread", "diversity", "batch_spread", "batch_diversity", "energy_score", "chunk_error"),
    *("chunk_spread", "reconstruction", "classification", "accuracy"),
)
LISTS = ("drift", "neighbors", "warnings")
MAPPINGS = ("drift_groups", "scale", "evaluation", "unreadable")
Row = dict[str, Any]


class Rows(NamedTuple):
    """Header and rows of a file, in the order of steps, and the number of lines that were skipped."""

    header: Row
    rows: list[Row]
    skipped: int


def read_rows(path: Path, most: int = MOST_ROWS) -> Rows:
    """Read the metrics of a run; a missing file is empty.

    The last row of a repeated step counts. Lines that are cut, or have a field of another type, are skipped.
    Of more than about ``most`` rows, neighbors are averaged. The last row stays as it is, and so do rows with
    an evaluation, a new warning, or the last list of unreadable images.
    """
    header: Row = {}
    kept = _Thinned(most)
    skipped = 0
    for line in _lines(path):
        record = _parse(line)
        if record is None:
            skipped += 1
        elif isinstance(record.get("header"), dict):
            header = record["header"]
        else:
            kept.add(record)
    return Rows(header, kept.finish(), skipped)


def _lines(path: Path) -> Iterator[bytes]:
    if not path.is_file():  # a pipe would wait for its other end
        return
    try:
        with path.open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                if line.strip():
                    yield line
    except OSError:
        return


def _parse(line: bytes) -> Row | None:
    """Return a header or a row; None if the line is damaged or a field has another type."""
    try:
        record = parse_json(line, finite=False)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("header"), dict):
        return record
    step = record.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < LARGEST_STEP:
        return None
    for kind, names in ((_is_number, NUMBERS), (_is_list, LISTS), (_is_mapping, MAPPINGS)):
        if not all(kind(record[name]) for name in names if record.get(name) is not None):
            return None
    return record


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_mapping(value: object) -> bool:
    return isinstance(value, dict)


class _Thinned:
    """Rows by step. Ordinary rows are averaged with their neighbors, so that there are about ``most``."""

    def __init__(self, most: int) -> None:
        self.most, self.stride = most, 1
        self.rows: dict[int, Row] = {}
        self.weights: dict[int, int] = {}  # number of rows that an ordinary row stands for
        self.warnings: set[str] = set()
        self.unreadable: int | None = None  # step of the last list

    def add(self, row: Row) -> None:
        """Add a row."""
        step, special = row["step"], bool(row.get("evaluation"))
        for text in row.get("warnings") or []:
            special |= str(text) not in self.warnings
            self.warnings.add(str(text))
        if row.get("unreadable"):
            if self.unreadable in self.rows and not self.rows[self.unreadable].get("evaluation"):
                self.weights.setdefault(self.unreadable, 1)
            self.unreadable, special = step, True
        self.rows[step] = row
        self.weights.pop(step, None)
        if not special:
            self.weights[step] = 1
            if len(self.weights) > 2 * self.most:
                self._merge()

    def _merge(self) -> None:
        self._merge_neighbors()
        while len(self.weights) > self.most:
            self.stride *= 2
            self._merge_neighbors()

    def _merge_neighbors(self) -> None:
        """Average neighbors until each stands for ``stride`` rows; the last row stays."""
        last = max(self.rows)
        gathered: list[int] = []
        for step in sorted(self.weights.keys() - {last}):
            gathered.append(step)
            if sum(self.weights[s] for s in gathered) >= self.stride:
                self._replace(gathered)
                gathered = []
        self._replace(gathered)

    def _replace(self, steps: list[int]) -> None:
        """Replace rows by their average, at the last of their steps."""
        if len(steps) < 2:
            return
        weights = [self.weights.pop(step) for step in steps]
        merged = _average([self.rows.pop(step) for step in steps], weights)
        self.rows[steps[-1]], self.weights[steps[-1]] = merged, sum(weights)

    def finish(self) -> list[Row]:
        """Return the rows in the order of steps."""
        if self.stride > 1:
            self._merge_neighbors()
        return [self.rows[step] for step in sorted(self.rows)]


def _average(values: list[Any], weights: list[int]) -> Any:
    """Average numbers, also those in lists and mappings; of anything else return the last value."""
    last = values[-1]
    if len(values) == 1:
        return last
    if isinstance(last, dict):
        groups = [
            (key, [i for i, v in enumerate(values) if isinstance(v, dict) and key in v]) for key in last
        ]
        return {
            k: _average([values[i][k] for i in chosen], [weights[i] for i in chosen]) for k, chosen in groups
        }
    if isinstance(last, list):
        chosen = [i for i, v in enumerate(values) if isinstance(v, list) and len(v) == len(last)]
        parts = [weights[i] for i in chosen]
        return [_average([values[i][k] for i in chosen], parts) for k in range(len(last))]
    numbers = [(v, w) for v, w in zip(values, weights, strict=True) if _is_number(v) and math.isfinite(v)]
    if not numbers or not (last is None or _is_number(last)):
        return last
    return sum(v * w for v, w in numbers) / sum(w for _, w in numbers)
