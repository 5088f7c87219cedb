"""Figure of a guidance sweep: metrics against α, and against each other (appendix "Ablation on CFG")."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from driftgen.errors import InputError
from driftgen.report.figures import DATA_COLOR, GENERATED_COLOR, INK, STYLE
from driftgen.support.atomic_write import atomic_write

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes

__all__ = ["draw_sweep"]

Row = Mapping[str, Any]


class _Metric(NamedTuple):
    key: str
    name: str
    color: str
    lowest_is_best: bool


def draw_sweep(rows: Sequence[Row], metric: str, out: Path, title: str | None = None) -> list[Path]:
    """Draw a guidance sweep as ``sweep.png`` and ``sweep.svg`` in ``out``; return both paths.

    The panels are those of the paper: the Fréchet distance against α, the Inception score against α, and the
    Inception score against the Fréchet distance with α beside each point. Without Inception scores the last
    two are precision and recall against α, and precision against recall. A panel without values is left out.
    A larger point marks the best value against α.

    Args:
        rows: one per value of α, in any order: ``guidance``, the Fréchet distance under its name, and as far
            as they are known ``inception_score``, ``precision`` and ``recall``.
        metric: name of the Fréchet distance, such as ``"FID"``; its key in the rows.
        out: the folder.
        title: title of the figure; "Guidance sweep" and the number of samples if None.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: float(row["guidance"]))
    if not rows:
        raise InputError("rows is empty: give at least one value of guidance")
    if title is None:
        count = rows[0].get("samples")
        title = "Guidance sweep" + (f", {count:,} samples each" if isinstance(count, int) else "")
    distance = _Metric(metric, metric, GENERATED_COLOR, True)
    score = _Metric("inception_score", "Inception score", DATA_COLOR, False)
    precision = _Metric("precision", "precision", DATA_COLOR, False)
    recall = _Metric("recall", "recall", "#3a9e6f", False)
    second, pair = [score], (distance, score)
    if not _points(rows, score.key):
        second, pair = [precision, recall], (recall, precision)
    single = [kinds for kinds in ([distance], second) if any(_points(rows, m.key) for m in kinds)]
    both = _points(rows, pair[0].key, pair[1].key)
    panels = len(single) + bool(both)
    if panels == 0:
        names = ", ".join(repr(k) for k in (metric, "inception_score", "precision", "recall"))
        raise InputError(f"rows hold no finite value of {names}: there is nothing to draw")
    with matplotlib.rc_context(STYLE | {"svg.fonttype": "none", "svg.hashsalt": "driftgen"}):
        figure = Figure(figsize=(0.4 + 4.5 * panels, 4.2), layout="constrained")
        axes = figure.subplots(1, panels, squeeze=False)[0]
        for panel, kinds in zip(axes, single, strict=False):
            _against_guidance(panel, rows, [m for m in kinds if _points(rows, m.key)])
        if both:
            _against_each_other(axes[-1], both, *pair)
        figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left", fontsize=15, fontweight="bold")
        paths = [out / "sweep.png", out / "sweep.svg"]
        for place in paths:
            with atomic_write(place) as scratch:
                # Without a date the same rows give the same SVG.
                metadata = {"Date": None} if place.suffix == ".svg" else None
                figure.savefig(scratch, dpi=110, facecolor="white", metadata=metadata)
    return paths


def _points(rows: Sequence[Row], *keys: str) -> list[tuple[float, ...]]:
    """Return α and the values of the rows that have finite values of all keys."""
    points = []
    for row in rows:
        values = [row.get(key) for key in keys]
        if all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            points.append((float(row["guidance"]), *map(float, values)))  # type: ignore[arg-type]
    return points


def _against_guidance(axes: Axes, rows: Sequence[Row], metrics: Sequence[_Metric]) -> None:
    for metric in metrics:
        alphas, values = zip(*_points(rows, metric.key), strict=True)
        axes.plot(
            alphas, values, color=metric.color, linewidth=2.5, marker="o", markersize=6, label=metric.name
        )
        if len(metrics) == 1:
            best, shift, side = (
                (min(values), -9, "top") if metric.lowest_is_best else (max(values), 9, "bottom")
            )
            at = alphas[values.index(best)]
            axes.plot([at], [best], "o", color=metric.color, markersize=11)
            _annotate(axes, f"{best:.4g}", (at, best), (0, shift), ha="center", va=side)
    if len(metrics) > 1:
        axes.legend(fontsize=11)
    axes.set_xlabel("guidance α")
    axes.set_ylabel(" and ".join(metric.name for metric in metrics))
    _finish(axes)


def _against_each_other(axes: Axes, points: Sequence[tuple[float, ...]], x: _Metric, y: _Metric) -> None:
    _, across, up = zip(*points, strict=True)
    axes.plot(across, up, color="#777777", linewidth=1.5, zorder=1)
    axes.scatter(across, up, color=y.color, s=45, zorder=2)
    for i, (alpha, *place) in enumerate(points):
        text = f"α = {alpha:g}" if i == 0 else f"{alpha:g}"
        before, after = points[max(i - 1, 0)], points[min(i + 1, len(points) - 1)]
        # Beside a rising curve there is room below it, beside a falling one above it.
        rising = (after[1] - before[1]) * (after[2] - before[2]) > 0
        peak = before[2] < place[1] > after[2]
        below = rising and not peak
        _annotate(axes, text, tuple(place), (7, -4 if below else 4), va="top" if below else "bottom")
    axes.set_xlabel(x.name)
    axes.set_ylabel(y.name)
    _finish(axes)


def _annotate(axes: Axes, text: str, at: Any, shift: tuple[float, float], **alignment: Any) -> None:
    axes.annotate(text, at, shift, textcoords="offset points", fontsize=10.5, color=INK, **alignment)


def _finish(axes: Axes) -> None:
    axes.margins(0.14)
    axes.grid(visible=True, which="major", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.locator_params(axis="both", nbins=5)
