"""Table of docs/reliability.md: the figures of ``make torture``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tools.records import Results, markdown

__all__ = ["table"]


def table(results: Results) -> str:
    """Cases, survivors and faults of each part."""
    record = results.load("reliability/reliability.json")
    parts = record["parts"]
    kills, files, lines = (parts.get(name) for name in ("kills", "files", "command lines"))
    arguments, numbers, memory = (parts.get(name) for name in ("arguments", "numbers", "memory"))
    rows = [
        ("kills (SIGKILL), after which the run resumed, bit-equal", _kind(kills, "kills survived"), kills),
        ("of these kills, inside the writing of a checkpoint", _kind(kills, "kills inside a save"), None),
        ("interrupts (Ctrl-C, SIGTERM), likewise", _kind(kills, "interrupts survived"), None),
        ("kills of one process of a group, likewise", _kind(kills, "lost processes survived"), None),
        ("damaged files", _kind(files, "damages"), files),
        ("files with an odd value", _kind(files, "odd values"), None),
        ("command lines with an odd value", _lines(lines), lines),
        ("calls of the API with an odd argument", _slowest(arguments), arguments),
        ("fields and losses against float64", _worst(numbers), numbers),
        ("growth of memory, with reports and previews", _growth(memory), memory),
    ]
    cells = [(what, figure, "" if part is None else f"{part['faults']:,}") for what, figure, part in rows]
    return f"{_heading(record)}\n\n{markdown(('', 'measured', 'faults'), cells)}"


def _heading(record: Mapping[str, Any]) -> str:
    complete = "" if record["complete"] else ", stopped before its end"
    return (
        f"{record['minutes']:g} minutes on {record['cores']} cores ({record['hardware']}, torch "
        f"{record['torch']}), seed {record['seed']}, {record['faults']:,} "
        f"{'fault' if record['faults'] == 1 else 'faults'}{complete}: "
        f"`{record['command']}`"
    )


def _kind(part: Mapping[str, Any] | None, kind: str) -> str:
    return "not run" if part is None else f"{part['kinds'].get(kind, 0):,}"


def _slowest(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "not run"
    slowest = part["largest"].get("seconds", 0.0)
    return f"{part['tried']:,}, the slowest answer after {slowest:.1f} s"


def _lines(part: Mapping[str, Any] | None) -> str:
    """Some odd values are right, and their command does its work: only refusals are timed."""
    if part is None:
        return "not run"
    refused, slowest = part["kinds"].get("refused", 0), part["largest"].get("seconds", 0.0)
    return f"{part['tried']:,}, of which {refused:,} were refused, the slowest after {slowest:.1f} s"


def _worst(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "not run"
    worst = part["largest"].get("relative error")
    return f"{part['tried']:,}" + ("" if worst is None else f", worst relative error {worst:.1e}")


def _growth(part: Mapping[str, Any] | None) -> str:
    if part is None:
        return "not run"
    slope = part["largest"].get("bytes a step")
    steps = f"{part['tried']:,} steps"
    return f"{steps}, too few to tell" if slope is None else f"{slope:,.0f} bytes per step over {steps}"
