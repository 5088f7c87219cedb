"""Output files of toy runs: figures, animations, metrics and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driftgen.report.figures import draw_comparison, draw_evolution, write_animation
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.provenance import provenance
from driftgen.training.toy_study import Evolution, ToyConfig, show_energy_distance

__all__ = ["evolution_title", "metric_rows", "study_table", "write_evolution", "write_study"]

METRICS = "metrics.json"

INIT_WORDS = {
    "between": "starting in the middle",
    "far": "starting far away",
    "collapsed": "starting collapsed on one spot",
}


def evolution_title(name: str, config: ToyConfig) -> str:
    """Return a title such as "swiss-roll: generator, starting in the middle"."""
    return f"{name}: {'generator' if config.generator else 'points'}, {INIT_WORDS[config.init]}"


def write_evolution(evolution: Evolution, out: Path, command: str) -> list[Path]:
    """Write ``evolution.png``, ``evolution.gif`` and ``metrics.json`` to ``out``; return their paths."""
    make_folder(out)
    title = evolution_title(evolution.metrics["distribution"], evolution.config)
    picture, animation, metrics = (out / f for f in ("evolution.png", "evolution.gif", METRICS))
    draw_evolution(evolution, picture, title)
    write_animation(evolution, animation, title)
    _write_json(metrics, provenance(command) | evolution.metrics)
    return [picture, animation, metrics]


def metric_rows(metrics: dict[str, Any]) -> dict[str, str]:
    """Format the metrics of a toy run for display.

    ``drift_at_start`` and ``drift_at_end`` are left out: normalized over both axes, V grows with the number
    of points per sample, so they are on another scale than the drift of a step.
    """
    rows = {
        "energy distance to fresh data, start": show_energy_distance(metrics["energy_distance_at_start"]),
        "energy distance to fresh data, end": show_energy_distance(metrics["energy_distance"]),
        "energy distance between fresh data": show_energy_distance(
            metrics["energy_distance_of_data_to_itself"]
        ),
    }
    if "drift_of_first_step" in metrics:  # not in files of older versions
        rows["mean squared drift, first step"] = f"{metrics['drift_of_first_step']:.3g}"
        rows["mean squared drift, last step"] = f"{metrics['drift_of_last_step']:.3g}"
    if "mode_shares" in metrics:
        rows["share of the smallest mode (ideal: 1)"] = f"{metrics['least_mode_share']:.2f}"
    rows["seconds"] = f"{metrics['seconds']:.1f}"
    return rows


def write_study(runs: dict[str, Evolution], out: Path, command: str) -> list[Path]:
    """Write ``comparison.png``, ``table.md`` and ``metrics.json`` of the anti-symmetry study to ``out``."""
    make_folder(out)
    first = next(iter(runs.values()))
    picture, table, metrics = (out / f for f in ("comparison.png", "table.md", METRICS))
    draw_comparison(
        runs, picture, f"{first.metrics['distribution']}: effect of breaking the anti-symmetry of V"
    )
    _write_text(table, study_table(runs))
    record = provenance(command) | {"runs": {name: run.metrics for name, run in runs.items()}}
    _write_json(metrics, record)
    return [picture, table, metrics]


def study_table(runs: dict[str, Evolution]) -> str:
    """Return the study as a Markdown table with rows in the paper's order."""
    lines = [
        "| case | drifting field V | energy distance | spread (data 1) |",
        "|---|---|---:|---:|",
    ]
    for name, run in runs.items():
        c, m = run.config, run.metrics
        plus = "V⁺" if c.attraction == 1 else f"{c.attraction:g}V⁺"
        minus = "" if c.repulsion == 0 else " − V⁻" if c.repulsion == 1 else f" − {c.repulsion:g}V⁻"
        lines.append(f"| {name} | {plus}{minus} | {m['energy_distance']:.4f} | {m['spread']:.2f} |")
    reference = next(iter(runs.values())).metrics["energy_distance_of_data_to_itself"]
    lines += ["", f"Energy distance between two fresh sets of data: {reference:.4f}."]
    if min(reference, *(run.metrics["energy_distance"] for run in runs.values())) < 0:
        lines[-1] += " These are unbiased estimates: one below 0 means that no difference is found."
    return "\n".join(lines) + "\n"


def _write_json(path: Path, record: dict[str, Any]) -> None:
    _write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def _write_text(path: Path, text: str) -> None:
    with atomic_write(path) as scratch:
        scratch.write_text(text, encoding="utf-8")
