"""Summary of the studies of ``driftgen ablate``."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tools.records import Results, markdown

__all__ = ["summary"]

VERDICTS = ("holds", "unclear", "reversed")


def summary(results: Results) -> str:
    """Return one row per study: its base, how many pairs of the paper's ordering hold, and its time."""
    header = ("study", "base", *VERDICTS, "training", "hardware")
    folders = sorted(path.parent.name for path in (results.folder / "ablations").glob("*/table.json"))
    rows = [_row(folder, results.load(f"ablations/{folder}/table.json")) for folder in folders]
    return markdown(header, rows)


def _row(folder: str, record: dict[str, Any]) -> list[str]:
    counts = Counter(pair["verdict"] for pair in record["order"])
    seconds = sum(run["seconds"] for row in record["rows"] for run in row["runs"])
    seconds += sum(encoder["seconds"] or 0.0 for encoder in record["encoders"].values())
    return [
        f"[{record['title']}]({folder}/table.md)",
        record["base"],
        *(str(counts[verdict]) if record["order"] else "" for verdict in VERDICTS),
        f"{seconds / 60:.0f} min",
        record["hardware"],
    ]
