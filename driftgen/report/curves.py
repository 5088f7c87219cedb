"""The curves of a run: raw drift, spread, diversity and the rest, each a picture of its own."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from driftgen.report.figures import DATA_COLOUR, GENERATED_COLOUR, STYLE

__all__ = ["draw_curves"]

COLOURS = (GENERATED_COLOUR, DATA_COLOUR, "#3a9e6f", "#a05bb5", "#8a6d3b", "#c0392b", "#17807e", "#7f7f7f")
MOST_POINTS = 300  # of a line; more cannot be told apart
Row = Mapping[str, Any]
Line = tuple[list[float], list[float]]


class _Panel(NamedTuple):
    title: str
    note: str
    lines: dict[str, Line]
    log: bool = False
    level: float | None = None  # what the data has


def draw_curves(header: Row, rows: Sequence[Row]) -> Iterator[tuple[str, str, bytes]]:
    """Title, a note and a PNG for each curve that the rows hold."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator

    for panel in _panels(header, rows):
        lines = {name: line for name, line in panel.lines.items() if line[0]}
        if not lines:
            continue
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(5.6, 3.4), layout="constrained")
            axes = figure.add_subplot()
            for (name, (x, y)), colour in zip(lines.items(), COLOURS, strict=False):
                axes.plot(x, y, color=colour, label=name, linewidth=2, marker="o" if len(x) < 3 else None)
            if panel.level is not None:
                axes.axhline(panel.level, color="#555555", linewidth=1.2, linestyle="--")
            low, high = (end(end(y) for _, y in lines.values()) for end in (min, max))
            if panel.log and high > 4 * low:
                axes.set_yscale("log")
                # More than one number on an axis of less than two decades.
                axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.minorticks_off()
            elif low >= 0:
                axes.set_ylim(bottom=0)  # so that what is flat looks flat
            if len(lines) > 1:
                axes.legend(fontsize=10, ncols=1 + (len(lines) > 4))
            axes.set_xlabel("step")
            axes.grid(visible=True, which="major", color="#e6e6e6")
            axes.set_axisbelow(True)
            axes.locator_params(axis="x", nbins=5)
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=110, facecolor="white")
        yield panel.title, panel.note, buffer.getvalue()


def _panels(header: Row, rows: Sequence[Row]) -> Iterator[_Panel]:
    temperatures = header.get("temperatures") or []
    count = max((len(r["drift"]) for r in rows if isinstance(r.get("drift"), list)), default=0)
    names = [f"τ = {temperatures[i]:g}" if i < len(temperatures) else f"field {i + 1}" for i in range(count)]
    drifts = {name: _line(rows, lambda r, i=i: r["drift"][i], log=True) for i, name in enumerate(names)}
    yield _Panel("Raw drift per temperature", "Falls until only sampling noise is left.", drifts, log=True)
    groups = list(dict.fromkeys(g for r in rows for g in r.get("drift_groups") or {}))[: len(COLOURS)]
    by_group = {g: _line(rows, lambda r, g=g: _mean(r["drift_groups"][g]), log=True) for g in groups}
    yield _Panel("Raw drift per feature group", "Mean over temperatures.", by_group, log=True)
    against = {key: _line(rows, lambda r, key=key: r[key]) for key in ("spread", "diversity")}
    note = (
        "Of generated samples against real ones; the data has 1. Well below: collapse; far above: divergence."
    )
    yield _Panel("Spread and within-class diversity", note, against, level=1.0)
    for key, title, note, log in (
        ("reconstruction", "Reconstruction error", "", True),
        ("classification", "Classification loss", "", False),
        ("accuracy", "Accuracy of the classifier", "", False),
        ("gradient_norm", "Gradient norm", "Before clipping.", True),
        ("learning_rate", "Learning rate", "", False),
        ("samples_per_second", "Samples per second", "", False),
        ("loss", "Loss", "Flat by design: watch the raw drift." if count else "", False),
    ):
        yield _Panel(title, note, {title: _line(rows, lambda r, key=key: r[key], log=log)}, log=log)


def _line(rows: Sequence[Row], value: Any, log: bool = False) -> Line:
    """Steps and values of the rows that have one, thinned by means over equal shares of the rows."""
    points = []
    for row in rows:
        try:
            y = float(value(row))
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        if math.isfinite(y) and (y > 0 or not log):
            points.append((float(row["step"]), y))
    share = math.ceil(len(points) / MOST_POINTS)
    parts = [points[i : i + share] for i in range(0, len(points), max(share, 1))]
    x, y_ = ([_mean([p[i] for p in part]) for part in parts] for i in (0, 1))
    return x, y_


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
