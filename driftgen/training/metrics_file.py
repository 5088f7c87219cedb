"""Read the ``metrics.jsonl`` of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.support.untrusted_files import read_bytes

__all__ = ["read_metrics"]


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
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(record, dict):
            continue
        if isinstance(record.get("header"), dict):
            header = record["header"]
        elif isinstance(step := record.get("step"), int) and 0 <= step < 2**63:
            rows[record["step"]] = record
    return header, [rows[step] for step in sorted(rows)]
