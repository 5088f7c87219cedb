"""Training curves of a run, one figure each: raw drift, spread, diversity and the rest."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from driftgen.report.figures import DATA_COLOR, GENERATED_COLOR, STYLE

__all__ = ["draw_curves"]

COLORS = (GENERATED_COLOR, DATA_COLOR, "#3a9e6f", "#a05bb5", "#8a6d3b", "#c0392b", "#17807e", "#7f7f7f")
MAX_POINTS = 300  # per line; more are indistinguishable
Row = Mapping[str, Any]
Line = tuple[list[float], list[float]]


class _Panel(NamedTuple):
    title: str
    note: str
    lines: dict[str, Line]
    log: bool = False
    level: float | None = None  # value of the real data


def draw_curves(header: Row, rows: Sequence[Row]) -> Iterator[tuple[str, str, bytes]]:
    """Yield the title, a note and a PNG for each curve present in the rows."""
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
            for (name, (x, y)), color in zip(lines.items(), COLORS, strict=False):
                axes.plot(x, y, color=color, label=name, linewidth=2, marker="o" if len(x) < 3 else None)
            if panel.level is not None:
                axes.axhline(panel.level, color="#555555", linewidth=1.2, linestyle="--")
            low, high = (end(end(y) for _, y in lines.values()) for end in (min, max))
            if panel.log and high > 4 * low:
                axes.set_yscale("log")
                # Label more than the decades if the axis spans less than two.
                axes.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
                axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                axes.minorticks_off()
            elif low >= 0:
                axes.set_ylim(bottom=0)  # a flat curve should look flat
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
    note = "Falls until only sampling noise remains."
    yield _Panel("Raw drift per temperature", note, drifts, log=True)
    groups = list(dict.fromkeys(g for r in rows for g in r.get("drift_groups") or {}))[: len(COLORS)]
    by_group = {g: _line(rows, lambda r, g=g: _mean(r["drift_groups"][g]), log=True) for g in groups}
    yield _Panel("Raw drift per feature group", "Mean over temperatures.", by_group, log=True)
    labels = {"spread": "spread", "diversity": "diversity"}
    note = "Relative to real samples. 1 is ideal; far below: collapse; far above: divergence."
    if any("batch_spread" in r for r in rows):
        note = note.replace(".", ", averaged weights unless named.", 1)
        labels |= {"batch_spread": "spread, trained weights", "batch_diversity": "diversity, trained weights"}
    relative = {text: _line(rows, lambda r, key=key: r[key]) for key, text in labels.items()}
    yield _Panel("Spread and within-class diversity", note, relative, level=1.0)
    yield from _evaluation_panels(rows)
    for key, title, note, log in (
        ("reconstruction", "Reconstruction error", "Averaged weights, fixed images.", True),
        ("classification", "Classification loss", "Averaged weights, fixed images.", False),
        ("accuracy", "Classifier accuracy", "Averaged weights, fixed images.", False),
        ("gradient_norm", "Gradient norm", "Before clipping.", True),
        ("learning_rate", "Learning rate", "", False),
        ("samples_per_second", "Samples per second", "", False),
        ("loss", "Loss", "Flat by design: watch the raw drift." if count else "", False),
    ):
        yield _Panel(title, note, {title: _line(rows, lambda r, key=key: r[key], log=log)}, log=log)


def _evaluation_panels(rows: Sequence[Row]) -> Iterator[_Panel]:
    """Yield the Fréchet distance of each average."""
    evaluations = [r["evaluation"] for r in rows if isinstance(r.get("evaluation"), dict)]
    for metric in dict.fromkeys(e["metric"] for e in evaluations):
        decays = dict.fromkeys(decay for e in evaluations for decay in e["ema"])
        lines = {
            f"EMA {decay}": _line(rows, lambda r, d=decay, m=metric: r["evaluation"]["ema"][d][m], log=True)
            for decay in decays
        }
        counts = sorted({e["samples"] for e in evaluations if e["metric"] == metric})
        note = (
            f"Of {', '.join(f'{n:,}' for n in counts)} samples against the training images. Lower is better."
        )
        yield _Panel(metric, note, lines, log=True)


def _line(rows: Sequence[Row], value: Any, log: bool = False) -> Line:
    """Return the steps and values of the rows that have a value, averaged over bins of equal size."""
    points = []
    for row in rows:
        try:
            y = float(value(row))
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        if math.isfinite(y) and (y > 0 or not log):
            points.append((float(row["step"]), y))
    bin_size = math.ceil(len(points) / MAX_POINTS)
    bins = [points[i : i + bin_size] for i in range(0, len(points), max(bin_size, 1))]
    steps, values = ([_mean([p[i] for p in part]) for part in bins] for i in (0, 1))
    return steps, values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
