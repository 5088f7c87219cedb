"""Training curves of a run: raw drift, spread, diversity and the rest, one panel each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["GROUPS", "Panel", "run_panels"]

MAX_POINTS = 300  # per line; more are indistinguishable
MAX_LINES = 8  # per panel
LARGEST = 1e100  # drawn value; differences of larger ones overflow
GROUPS = "Raw drift per feature group"
HELD_OUT = "Averaged weights, held-out demonstrations."
Row = Mapping[str, Any]
Line = tuple[list[float], list[float]]


class Panel(NamedTuple):
    """Curves on common axes.

    Attributes:
        title: name of the quantity.
        note: how to read it, or "".
        lines: steps and values of each curve, by name.
        log: True if the values are positive and may be drawn on a log axis.
        level: value of the real data, or None.
        prefix: of the title of one of the curves alone; None for the title and a comma.
    """

    title: str
    note: str
    lines: dict[str, Line]
    log: bool = False
    level: float | None = None
    prefix: str | None = None

    def title_of(self, curve: str) -> str:
        """Return the title of a chart that shows one of the curves."""
        if curve == self.title:
            return self.title
        title = f"{self.title}, {curve}" if self.prefix is None else f"{self.prefix}{curve}"
        return title[:1].upper() + title[1:]


def run_panels(header: Row, rows: Sequence[Row]) -> list[Panel]:
    """Return the panels that the rows have values for."""
    found = []
    for panel in _panels(header, rows):
        lines = {name: line for name, line in panel.lines.items() if line[0]}
        if lines:
            found.append(panel._replace(lines=lines))
    return found


def _panels(header: Row, rows: Sequence[Row]) -> Iterator[Panel]:
    given = header.get("temperatures")
    temperatures = [t for t in given if isinstance(t, int | float)] if isinstance(given, list) else []
    count = max((len(r["drift"]) for r in rows if isinstance(r.get("drift"), list)), default=0)
    names = [f"τ = {temperatures[i]:g}" if i < len(temperatures) else f"field {i + 1}" for i in range(count)]
    drifts = {name: _line(rows, lambda r, i=i: r["drift"][i], log=True) for i, name in enumerate(names)}
    note = "Falls until only sampling noise remains."
    yield Panel("Raw drift per temperature", note, drifts, log=True, prefix="raw drift, ")
    mappings = [r["drift_groups"] for r in rows if isinstance(r.get("drift_groups"), dict)]
    groups = list(dict.fromkeys(g for mapping in mappings for g in mapping))[:MAX_LINES]
    by_group = {g: _line(rows, lambda r, g=g: _mean(r["drift_groups"][g]), log=True) for g in groups}
    if len(groups) > 1:
        yield Panel(GROUPS, "Mean over temperatures.", by_group, log=True)
    within = any("diversity" in r for r in rows)  # not of a policy
    labels = {"spread": "spread", "diversity": "diversity"}
    note = "Relative to real samples. 1 is ideal; far below: collapse; far above: divergence."
    if any("batch_spread" in r for r in rows):
        note = note.replace(".", ", averaged weights unless named.", 1)
        labels |= {"batch_spread": "spread, trained weights", "batch_diversity": "diversity, trained weights"}
    relative = {text: _line(rows, lambda r, key=key: r[key]) for key, text in labels.items()}
    title = "Spread and within-class diversity" if within else "Spread"
    yield Panel(title, note, relative, level=1.0, prefix="")
    yield from _evaluation_panels(rows)
    for key, title, note, log in (
        ("energy_score", "Energy score", HELD_OUT + " Lower is better.", False),
        ("chunk_error", "Error of chunks", HELD_OUT, False),
        ("chunk_spread", "Distance between chunks", HELD_OUT + " Of one observation.", False),
        ("reconstruction", "Reconstruction error", "Averaged weights, fixed images.", True),
        ("classification", "Classification loss", "Averaged weights, fixed images.", False),
        ("accuracy", "Classifier accuracy", "Averaged weights, fixed images.", False),
        ("gradient_norm", "Gradient norm", "Before clipping.", True),
        ("learning_rate", "Learning rate", "", False),
        ("samples_per_second", "Samples per second", "", False),
        ("loss", "Loss", "Flat by design: watch the raw drift." if count else "", False),
    ):
        yield Panel(title, note, {title: _line(rows, lambda r, key=key: r[key], log=log)}, log=log)


def _evaluation_panels(rows: Sequence[Row]) -> Iterator[Panel]:
    """Yield the Fréchet distance of each average."""
    dicts = [r["evaluation"] for r in rows if isinstance(r.get("evaluation"), dict)]
    evaluations = [e for e in dicts if isinstance(e.get("metric"), str) and isinstance(e.get("ema"), dict)]
    for metric in dict.fromkeys(e["metric"] for e in evaluations):
        decays = list(dict.fromkeys(decay for e in evaluations for decay in e["ema"]))[:MAX_LINES]
        lines = {
            f"EMA {decay}": _line(rows, lambda r, d=decay, m=metric: r["evaluation"]["ema"][d][m], log=True)
            for decay in decays
        }
        counts = dict.fromkeys(str(e.get("samples")) for e in evaluations if e["metric"] == metric)
        note = f"Of {', '.join(counts)} samples against the training images. Lower is better."
        yield Panel(metric, note, lines, log=True)


def _line(rows: Sequence[Row], value: Any, log: bool = False) -> Line:
    """Return the steps and values of the rows that have a value, averaged over bins of equal size."""
    points = []
    for row in rows:
        try:
            x, y = float(row["step"]), float(value(row))
        except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError, OverflowError):
            continue
        if abs(y) < LARGEST and (y > 0 or not log):  # false for NaN
            points.append((x, y))
    bin_size = math.ceil(len(points) / MAX_POINTS)
    bins = [points[i : i + bin_size] for i in range(0, len(points), max(bin_size, 1))]
    steps, values = ([_mean([p[i] for p in part]) for part in bins] for i in (0, 1))
    return steps, values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
