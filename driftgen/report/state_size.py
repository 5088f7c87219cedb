"""The size of a compact state, in lines for the terminal."""

from __future__ import annotations

from pathlib import Path

from driftgen.support.sizes import show_size
from driftgen.training.compact_state import StateReport

__all__ = ["show_state"]


def show_state(report: StateReport, out: Path) -> str:
    """Return the size of each part, the errors, and the folder in the last line."""
    each = report.size / max(report.parameters, 1)
    lines = [
        f"step {report.step:,}: {show_size(report.size)} in {report.files} files, "
        f"{report.bits} bits per weight, {each:.2f} bytes per parameter"
    ]
    for part, size in report.parts.items():
        error = f", relative error {report.errors[part]:.1e}" if part in report.errors else ""
        lines.append(f"  {part:9} {show_size(size):>10}{error}")
    return "\n".join([*lines, str(out)])
