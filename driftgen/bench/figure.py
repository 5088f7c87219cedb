"""Figure of ``driftgen bench scaling``: time and memory along each axis on log scales, with power fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from driftgen.bench.scaling_bench import Curve
from driftgen.report.figures import DATA_COLOR, GENERATED_COLOR, STYLE
from driftgen.support.atomic_write import atomic_write

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes

__all__ = ["draw_growth"]


def draw_growth(curves: Sequence[Curve], path: Path, title: str) -> None:
    """Draw a row for each part and a column for each axis: time (orange), memory (blue, right scale)."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    parts = list(dict.fromkeys(curve.part for curve in curves))
    columns = max(sum(curve.part == part for curve in curves) for part in parts)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(1 + 3.9 * columns, 1.3 + 3.3 * len(parts)), layout="constrained")
        grid = figure.subplots(len(parts), columns, squeeze=False)
        for row, part in zip(grid, parts, strict=True):
            shown = [curve for curve in curves if curve.part == part]
            for axes, curve in zip(row, shown, strict=False):
                _panel(axes, curve)
            for axes in row[len(shown) :]:
                axes.set_visible(False)
        lines = [
            Line2D([], [], color=color, marker="o", label=label)
            for color, label in ((GENERATED_COLOR, "time, ms"), (DATA_COLOR, "peak memory, MiB"))
        ]
        lines.append(Line2D([], [], color="#777777", linestyle="--", label="fitted power"))
        figure.legend(handles=lines, loc="outside lower center", ncols=3)
        figure.suptitle(title, x=0.01, ha="left", fontsize=15, fontweight="bold")
        with atomic_write(path) as scratch:
            figure.savefig(scratch, dpi=110, facecolor="white")


def _panel(axes: Axes, curve: Curve) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    x, powers = [float(point.value) for point in curve.points], curve.exponents
    memory = axes.twinx()
    series = (
        (axes, "seconds", [point.seconds * 1000 for point in curve.points], GENERATED_COLOR),
        (memory, "peak_bytes", [(point.peak_bytes or 0) / 2**20 for point in curve.points], DATA_COLOR),
    )
    words = []
    for place, key, y, color in series:
        power = powers[key]
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        place.tick_params(axis="y", colors=color)
        place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        place.plot(x, y, color=color, linewidth=2.5, marker="o", markersize=7)
        if power is None:
            continue
        half = x[min((len(x) - 1) // 2, len(x) - 2) :]
        fitted = [y[-1] * (value / x[-1]) ** power for value in half]
        place.plot(half, fitted, color="#777777", linewidth=1.2, linestyle="--")
        words.append(f"{'time' if place is axes else 'memory'} ~ n^{power:.2f}")
        low, high = min(y), max(y)
        place.yaxis.set_major_locator(LogLocator(subs=(1,) if high > 100 * low else (1, 2, 5)))
        place.yaxis.set_minor_locator(NullLocator())
    axes.set_title(f"{curve.part}: {', '.join(words)}", fontsize=11.5)
    axes.set_xlabel(curve.axis)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", color="#e6e6e6")
    axes.set_axisbelow(True)
    memory.spines["right"].set_visible(True)
