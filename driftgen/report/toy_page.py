"""``report.html`` of a toy run, and the toy as a section of another page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from driftgen.errors import InputError
from driftgen.report.embedded_images import Picture, embed_file
from driftgen.report.page import write_page
from driftgen.report.toy_files import INIT_WORDS, METRICS, metric_rows
from driftgen.support.untrusted_files import read_json

__all__ = ["ToyView", "read_toy", "write_toy_page"]


@dataclass(frozen=True)
class ToyView:
    """A toy run as a page shows it.

    Attributes:
        title: such as "bimodal: points, starting in the middle".
        picture: snapshots and drift.
        animation: the same as an animation.
        rows: metrics by name.
        command: that made it, or "".
        environment: versions and hardware.
        demo: True for the toy of the demo.
    """

    title: str
    picture: Picture | None
    animation: Picture | None
    rows: dict[str, str]
    command: str
    environment: dict[str, str]
    demo: bool


def read_toy(folder: Path, demo: bool = False) -> ToyView | None:
    """Read the files of a toy run; None if there is none or its metrics are damaged."""
    try:
        metrics = read_json(folder / METRICS, "metrics of a toy run", finite=False)
        config = metrics["config"]
        kind = "generator" if config["generator"] else "points"
        title = f"{metrics['distribution']}: {kind}, {INIT_WORDS[config['init']]}"
        rows = metric_rows(metrics)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None
    keys: list[str] = ["driftgen", "torch", "python", "hardware"]
    about = {key: str(metrics[key]) for key in keys if key in metrics}
    return ToyView(
        title,
        embed_file(folder / "evolution.png"),
        embed_file(folder / "evolution.gif"),
        rows,
        str(metrics.get("command", "")),
        about,
        demo,
    )


def write_toy_page(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a toy run, by default ``report.html`` in its folder, and return its path."""
    toy = read_toy(folder)
    if toy is None:
        raise InputError(f"{folder} holds no toy run: make one with driftgen toy bimodal --out {folder}")
    return write_page(
        out or folder / "report.html",
        "toy.html",
        title=toy.title[:1].upper() + toy.title[1:],
        subtitle="Drift of a two-dimensional distribution",
        contents={},
        origin=f"from the files in {folder.resolve().name}",
        toy=toy,
        environment=toy.environment,
    )
