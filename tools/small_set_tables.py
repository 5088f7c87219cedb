"""Tables of results/small-sets/README.md: Fashion-MNIST and Tiny-ImageNet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tools.records import Results, fill, markdown

__all__ = ["SETS", "best_row", "evaluations", "trainings"]

# Name of a set, and its folder in results/small-sets.
SETS = {"Fashion-MNIST, 28×28": "fashion-mnist", "Tiny-ImageNet, 20 classes, 64×64": "tiny-imagenet"}


def best_row(results: Results, folder: str = "fashion-mnist") -> dict[str, Any]:
    """Return the row of a set at the guidance with the least FID."""
    rows = results.load(f"small-sets/{folder}/evaluation.json")["rows"]
    best: dict[str, Any] = min(rows, key=lambda row: row["FID"])
    return best


def evaluations(results: Results) -> str:
    """Metrics of the samples of each set at each guidance that was measured."""
    rows = []
    for name, folder in SETS.items():
        record = results.load(f"small-sets/{folder}/evaluation.json")
        rows += [
            (
                name,
                f"{row['samples']:,} against {record['reference']['count']:,}",
                fill("{guidance:g}", row),
                fill("{FID:.2f}", row),
                fill("{KID:.5f}", row),
                fill("{precision:.3f}", row),
                fill("{recall:.3f}", row),
                fill("{density:.3f}", row),
                fill("{coverage:.3f}", row),
            )
            for row in record["rows"]
        ]
    header = ("data", "images", "guidance", "FID", "KID", "precision", "recall", "density", "coverage")
    return markdown(header, rows)


def trainings(results: Results) -> str:
    """Steps, time and memory of the encoder and of the generator of each set."""
    rows = []
    for name, folder in SETS.items():
        record = results.load(f"small-sets/{folder}/training.json")
        images = record["encoder"]["steps"] * record["encoder"]["batch_size"]
        for part, count in (("encoder", images), ("generator", record["generator"]["samples"])):
            run = record[part]
            rows.append(
                (
                    name,
                    part,
                    f"{run['steps']:,}",
                    f"{count / 1e6:.2f}M",
                    f"{run['seconds'] / 60:.0f}",
                    fill("{rate:.1f}", {"rate": _steps_per_second(run, record["curve"], part)}),
                    f"{run['memory_gib']:.1f} GiB",
                )
            )
    return markdown(("data", "network", "steps", "images or samples", "minutes", "steps/s", "memory"), rows)


def _steps_per_second(run: Mapping[str, Any], curve: Sequence[Mapping[str, Any]], part: str) -> float:
    """Return the rate of a run: of a generator after the first row of its curve, without compilation."""
    if part == "encoder":
        return float(run["steps"] / run["seconds"])
    first, last = curve[0], curve[-1]
    return float((last["step"] - first["step"]) / (last["seconds"] - first["seconds"]))
