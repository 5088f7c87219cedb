"""Read and repair the ``metrics.jsonl`` of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.support.untrusted_files import parse_json, read_bytes

__all__ = ["read_metrics", "repair_metrics"]


def read_metrics(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the header and the rows of a ``metrics.jsonl``, in the order of steps.

    The last row of a repeated step counts. Unreadable lines, such as the last line of a killed run, and a
    missing file are skipped.
    """
    header: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {}
    try:
        lines = read_bytes(path).decode("utf-8", errors="replace").splitlines()
    except (OSError, InputError):
        lines = []
    for line in lines:
        try:
            record = parse_json(line, finite=False)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        if isinstance(record.get("header"), dict):
            header = record["header"]
        elif isinstance(step := record.get("step"), int) and 0 <= step < 2**63:
            rows[record["step"]] = record
    return header, [rows[step] for step in sorted(rows)]


def repair_metrics(path: Path) -> bool:
    """Repair the last line of a file that a kill or a full disk has cut; return False if no line is left.

    A cut row is removed: otherwise the next row would continue its line, and both would be lost. A complete
    row without its line break gets one.
    """
    if not path.is_file() or path.is_symlink():
        return False
    content = path.read_bytes()
    last = content.rpartition(b"\n")[2]
    if last:
        try:
            json.loads(last)
        except (ValueError, RecursionError):
            size = len(content) - len(last)
            os.truncate(path, size)
            return size > 0
        with path.open("ab") as file:
            file.write(b"\n")
    return bool(content)
