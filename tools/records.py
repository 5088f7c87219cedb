"""Records of results/ and their numbers as text."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write

__all__ = ["Results", "fill", "markdown", "select", "without_folders", "write_record"]

LOCAL = re.compile(r"(?<![\w.])(?:/[\w.\-]+)+/")  # folders of the machine that a record was made on

# Factor from the unit of a record (seconds, bytes, operations, a number) to the unit of a table.
SCALES = {"ms": 1e3, "GiB": 2**-30, "TFLOP": 1e-12}


class Results:
    """JSON records of one folder, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.load = cache(self._load)

    def _load(self, path: str) -> Any:
        try:
            return json.loads((self.folder / path).read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"results/{path}: {error.strerror}; a table needs this file") from None
        except ValueError as error:
            raise InputError(f"results/{path} is no JSON file: {error}") from None

    def row(self, path: str, index: int = 0) -> dict[str, Any]:
        """Return one entry of the list ``rows`` of a record."""
        row: dict[str, Any] = self.load(path)["rows"][index]
        return row


class _Units(string.Formatter):
    """``str.format`` with units: ``{seconds:.3g ms}`` is 28.1 ms, ``{peak_bytes:.0f GiB}`` is 55 GiB."""

    def format_field(self, value: Any, format_spec: str) -> str:
        number, _, unit = format_spec.partition(" ")
        if not unit:
            return str(format(value, number))
        return f"{value * SCALES.get(unit, 1):{number}} {unit}"


def fill(template: str, record: Mapping[str, Any], **more: Any) -> str:
    """Fill a template with values of a record: ``fill("{figures[recognized]:.1%} recognized", record)``.

    A key in brackets goes one level down. A format may end in a unit, and ms, GiB and TFLOP convert from
    seconds, bytes and operations. ``more`` adds derived values.
    """
    try:
        return _Units().vformat(template, (), {**record, **more})
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InputError(f"{template!r} does not fit its record: {type(error).__name__} {error}") from None


def select(rows: Iterable[Mapping[str, Any]], **wanted: Any) -> Mapping[str, Any]:
    """Return the only row with these values."""
    found = [row for row in rows if wanted.items() <= row.items()]
    if len(found) != 1:
        raise InputError(f"{len(found)} rows have {wanted}: a table needs exactly one")
    return found[0]


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, *rows]
    for line in lines:
        if len(line) != len(header) or any("|" in cell or "\n" in cell for cell in line):
            raise InputError(f"the row {line} needs {len(header)} cells without '|' and line breaks")
    text = ["".join(f"| {cell} " if cell else "| " for cell in line) + "|" for line in lines]
    return "\n".join([text[0], "|" + "---|" * len(header), *text[1:]])


def without_folders(text: str) -> str:
    """Return a text in which paths have lost the folders of the machine."""
    return LOCAL.sub("", text)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON, without the folders of the machine."""
    with atomic_write(path) as scratch:
        scratch.write_text(without_folders(json.dumps(record, indent=1)) + "\n", encoding="utf-8")
