"""``report.html`` of a run, built from the files in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from driftgen.report.chart import make_chart
from driftgen.report.curves import run_panels
from driftgen.report.embedded_images import Picture, embed_images, embed_sheet
from driftgen.report.page import write_page
from driftgen.report.run_files import RunFiles, format_value, read_run
from driftgen.report.toy_page import read_toy
from driftgen.support.sheets import read_sheet
from driftgen.training.metrics_file import read_metrics
from driftgen.training.previews import NEAREST, REAL
from driftgen.training.run_folder import SAMPLES

__all__ = [
    "Frame",
    "describe_run",
    "evaluation_rows",
    "read_frames",
    "read_metrics",
    "read_real",
    "write_report",
]

FRAMES = 24  # maximum number of sheets of a timeline
FRAME_WIDTH, SHEET_WIDTH, CELL_WIDTH = 640, 1200, 128  # maximum widths in pixels
TOY, PACKAGED = "toy", "packaged.png"  # of a demo: folder of its toy, samples of a packaged model


@dataclass(frozen=True)
class Frame:
    """A sheet of a timeline, and its step as text."""

    label: str
    picture: Picture


@dataclass(frozen=True)
class Cell:
    """A picture with a line of text."""

    picture: Picture
    caption: str


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the report of a run, by default ``report.html`` in its folder, and return its path.

    Sections without data (samples, evaluation, metrics) are left out.
    """
    run = read_run(folder)
    frames, real = read_frames(run), read_real(run)
    nearest, nearest_note = _nearest(run)
    charts = [make_chart(panel) for panel in run_panels(run.header, run.rows)]
    toy = read_toy(folder / TOY, demo=True)
    values: dict[str, Any] = {
        "warnings": run.warnings(),
        "unreadable": run.unreadable() if run.unreadable()[0] else None,
        "frames": frames,
        "nearest": nearest,
        "evaluation": evaluation_rows(run.evaluation),
        "charts": charts,
        "packaged": _packaged(folder),
        "toy": toy,
        "facts": run.facts(),
        "config": run.config_text,
    }
    sections = {
        "warnings": ("warnings", "Warnings"),
        "unreadable": ("unreadable", "Unreadable images"),
        "frames": ("samples", "Reconstructions" if run.pretrains else "Samples"),
        "nearest": ("nearest", "Nearest training images"),
        "evaluation": ("evaluation", "Evaluation"),
        "charts": ("curves", "Curves"),
        "packaged": ("packaged", "A packaged model"),
        "toy": ("toy", "Toy"),
        "facts": ("run", "Run"),
        "config": ("configuration", "Configuration"),
    }
    command = run.header.get("command")
    return write_page(
        out or folder / "report.html",
        "run.html",
        title=f"Run {run.name}",
        subtitle=describe_run(run),
        contents={key: text for name, (key, text) in sections.items() if values[name]},
        origin=f"from the files in {run.name}",
        tiles=run.tiles(),
        pretrains=run.pretrains,
        sample_text=_sample_text(run, frames),
        real=real,
        nearest_note=nearest_note,
        notes=run.notes,
        command=command if isinstance(command, str) else "",
        environment=run.environment(),
        choices=run.choices(),
        **values,
    )


def read_frames(run: RunFiles, most: int = FRAMES) -> list[Frame]:
    """Return at most ``most`` sheets of a run, evenly spread over its steps, the first and the last included.

    Files that cannot be read are left out.
    """
    steps = list(run.sheets)
    count = min(most, len(steps))
    chosen = {steps[round(i * (len(steps) - 1) / max(count - 1, 1))] for i in range(count)}
    frames = []
    for step in sorted(chosen):
        sheet = read_sheet(run.sheets[step])
        if sheet is not None:
            width = SHEET_WIDTH if step == steps[-1] else FRAME_WIDTH
            frames.append(Frame(f"{step:,}", embed_sheet(sheet, width)))
    return frames


def read_real(run: RunFiles) -> Picture | None:
    """Return the sheet of real images of a run, if there is one."""
    sheet = read_sheet(run.folder / SAMPLES / REAL)
    return None if sheet is None else embed_sheet(sheet, SHEET_WIDTH)


def _packaged(folder: Path) -> Cell | None:
    """Return the sheet of a packaged model with its note, if there is one."""
    sheet = read_sheet(folder / PACKAGED)
    return None if sheet is None else Cell(embed_sheet(sheet, SHEET_WIDTH), sheet.note)


def _nearest(run: RunFiles) -> tuple[list[list[Cell]], str]:
    """Return the rows of the sheet of nearest training images (a sample, then its neighbors) and its note."""
    sheet = read_sheet(run.folder / SAMPLES / NEAREST)
    if sheet is None or len(sheet.captions) != len(sheet.images):
        return [], ""
    pictures = embed_images(list(sheet.images), CELL_WIDTH)
    cells = [Cell(picture, text) for picture, text in zip(pictures, sheet.captions, strict=True)]
    return [cells[i : i + sheet.columns] for i in range(0, len(cells), sheet.columns)], sheet.note


def describe_run(run: RunFiles) -> str:
    """Return the kind of a run, its recipe and its step, in one line."""
    kind = "Policy" if run.is_policy else "Masked autoencoder" if run.pretrains else "One-step generator"
    recipe, about = run.header.get("recipe"), run.config.get("about")
    parts = [kind]
    if isinstance(recipe, str) and recipe:
        parts.append(f"recipe {recipe}")
    if isinstance(about, str) and about:
        parts.append(about)
    if run.steps is not None and run.rows:
        parts.append("complete" if run.step >= run.steps else f"at step {run.step:,} of {run.steps:,}")
    return " · ".join(parts)


def _sample_text(run: RunFiles, frames: Sequence[Frame]) -> str:
    weights = run.header.get("weights")
    of = f"the averaged weights ({weights})" if isinstance(weights, str) else "the averaged weights"
    if run.pretrains:
        text = f"Training images, their visible patches, and the patches that {of} reconstruct."
    elif run.is_policy:
        text = f"Chunks of actions by {of} for held-out observations, beside the demonstrated ones."
    else:
        text = f"Samples of {of}, one row per class, one network call each."
    if len(frames) == 1:
        start = "Step 0: the initial weights, before the first step"
        text += f" {start}." if frames[0].label == "0" else f" Step {frames[0].label}."
    if len(frames) > 1:
        text += " Move the slider to see earlier training steps"
        text += "." if run.pretrains else ": the noise is the same at every step."
    return text


def evaluation_rows(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the text and the figures of ``evaluation.json``."""
    figures, bars = record.get("figures"), record.get("bars")
    rows = {str(k): format_value(v) for k, v in figures.items()} if isinstance(figures, dict) else {}
    lines = []
    calls, time = record.get("network_calls_per_image"), record.get("milliseconds_per_image")
    if calls is not None:
        count = "One network call" if calls == 1 else f"{format_value(calls)} network calls"
        lines.append(
            f"{count} per image" + ("." if time is None else f", {format_value(time)} milliseconds.")
        )
    for key in ("evaluator", "hardware", "note"):
        value = record.get(key)
        if isinstance(value, Mapping):
            value = ", ".join(f"{name} {entry}" for name, entry in value.items())
        if isinstance(value, str):
            lines.append(f"{key.capitalize()}: {value}.")
    if not rows and not lines:
        return None
    targets = {}
    if isinstance(bars, dict):
        relation = {key: "at most" if key == "copied" else "at least" for key in bars}
        targets = {str(k): f"{relation[k]} {format_value(v)}" for k, v in bars.items() if str(k) in rows}
    return {"lines": lines, "bold": calls is not None, "rows": rows, "targets": targets}
