"""Tables of results/cifar10/README.md: the model that ships, how it was trained, and in how many hours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tools.records import Results, fill, markdown

__all__ = ["SHIPPED", "best_row", "copies", "curve", "evaluations", "hours"]

SHIPPED = "cifar10/evaluation.json"
EVALUATIONS = {
    "shipped: EMA 0.999, 8 bits": (SHIPPED, "cifar10/evaluation-guidance.json"),
    "EMA 0.9995, float32": ("cifar10/evaluation-ema-0.9995.json",),
}
# Records of results/cifar10/experiments in the order of the commands.
STAGES = {
    "encoder-2": "encoder `mae-cifar10`",
    "encoder-labels": "encoder `mae-cifar10-labels`",
    "muon-fast": "generator, first run: one encoder",
    "two-encoders": "generator, second run: two encoders and crops",
}


def _stage(results: Results, name: str) -> dict[str, Any]:
    record: dict[str, Any] = results.load(f"cifar10/experiments/{name}.json")
    return record


def best_row(results: Results) -> dict[str, Any]:
    """Return the row of the shipped model at the guidance with the least FID."""
    row: dict[str, Any] = min(results.load(SHIPPED)["rows"], key=lambda row: row["FID"])
    return row


def evaluations(results: Results) -> str:
    """Metrics of 50,000 samples at each guidance that was measured."""
    rows = [
        (
            name,
            fill("{guidance:g}", row),
            fill("{FID:.2f}", row),
            fill("{KID:.5f}", row),
            fill("{precision:.3f}", row),
            fill("{recall:.3f}", row),
            fill("{density:.3f}", row),
            fill("{coverage:.3f}", row),
        )
        for name, paths in EVALUATIONS.items()
        for row in sorted(_rows(results, paths), key=lambda row: row["guidance"])
    ]
    header = ("weights", "guidance", "FID", "KID", "precision", "recall", "density", "coverage")
    return markdown(header, rows)


def _rows(results: Results, paths: Sequence[str]) -> list[dict[str, Any]]:
    return [row for path in paths for row in results.load(path)["rows"]]


def curve(results: Results) -> str:
    """FID of 10,000 samples at guidance 1 while the two runs trained."""
    rows, before = [], 0
    for name in ("muon-fast", "two-encoders"):
        record = _stage(results, name)
        per_step = record["samples"] // record["steps"]
        for point in record["curve"]:
            average = next(iter(point["ema"].values()))
            rows.append(
                (
                    STAGES[name].partition(": ")[2],
                    f"{point['step']:,}",
                    f"{(before + point['step'] * per_step) / 1e6:.1f}M",
                    fill("{FID:.1f}", average),
                    fill("{precision:.3f}", average),
                    fill("{recall:.3f}", average),
                )
            )
        before += record["samples"]
    return markdown(("run", "step", "samples so far", "FID", "precision", "recall"), rows)


def hours(results: Results) -> str:
    """Time of each command on one GPU."""
    rows, total = [], 0.0
    for name, what in STAGES.items():
        record = _stage(results, name)
        total += record["seconds"]
        rows.append(
            (
                what,
                f"[{name}](experiments/{name}.json)",
                fill("{steps:,}", record),
                f"{record['samples'] / 1e6:.1f}M",
                fill("{seed}", record),
                f"{record['seconds'] / 3600:.2f}",
            )
        )
    rows.append(("**together**", "", "", "", "", f"**{total / 3600:.2f}**"))
    return markdown(("stage", "record", "steps", "images", "seed", "hours"), rows)


def copies(results: Results) -> str:
    """Similarity of samples, and of test images, to the nearest training image."""
    record = results.load("cifar10/neighbors/neighbors.json")
    rows = [
        (
            what,
            fill("{median:.3f}", record[key]),
            fill("{highest:.3f}", record[key]),
            fill(f"{{{share}:.1%}}", record),
        )
        for what, key, share in (
            ("samples", "similarity", "share"),
            ("test images", "heldout_similarity", "heldout_share"),
        )
    ]
    near = fill("near-copies, above {threshold:.3f}", record)
    return markdown(("", "median similarity", "highest", near), rows)
