"""Geometry of a line chart, drawn as SVG by the page's template: colors and fonts follow the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from driftgen.report.curves import Panel

__all__ = ["Chart", "make_chart"]

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 10, 40
NARROW = 1e-6  # relative range of values that are equal for a reader
LOG_RATIO = 4  # a smaller ratio of the highest to the lowest value has a linear axis


@dataclass(frozen=True)
class Tick:
    """A position on an axis in the chart's units, and its label."""

    position: float
    label: str


@dataclass(frozen=True)
class Curve:
    """A curve as an SVG path, with the last value for the legend. A curve of one point has a dot.

    ``color`` counts the lines of the panel, also those without points.
    """

    name: str
    color: int
    path: str
    last: str
    dot: tuple[float, float] | None


@dataclass(frozen=True)
class Chart:
    """Everything that the template draws. ``scale`` maps positions back to values, for the cursor."""

    title: str
    note: str
    curves: list[Curve]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    level: float | None
    scale: dict[str, float | int]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def make_chart(panel: Panel) -> Chart:
    """Lay out the curves of a panel."""
    xs = [x for line in panel.lines.values() for x in line[0]]
    ys = [y for line in panel.lines.values() for y in line[1]]
    if panel.level is not None:
        ys.append(panel.level)
    low, high = min(ys), max(ys)
    log = panel.log and low > 0 and high > LOG_RATIO * low
    if log:
        y_values = _log_ticks(low, high)
        bottom, top = math.log10(min(low, y_values[0])), math.log10(max(high, y_values[-1]))
    else:
        if low >= 0:
            low = 0.0  # a flat curve should look flat
        if high - low <= NARROW * abs(low) or high == low:
            half = 0.1 * abs(low) or 0.5
            low, high = low - half, high + half
        y_values = _ticks(low, high, 5)
        bottom, top = min(low, y_values[0]), max(high, y_values[-1])
    first, last = min(xs), max(xs)
    first = 0.0 if first <= 0.25 * last else first
    if last == first:
        first, last = first - 0.5, last + 0.5
    x_values = [x for x in _ticks(first, last, 5) if first <= x <= last]

    def place_x(x: float) -> float:
        return round(LEFT + (x - first) / (last - first) * (WIDTH - LEFT - RIGHT), 1)

    def place_y(y: float) -> float:
        share = ((math.log10(y) if log else y) - bottom) / (top - bottom)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    curves = []
    for color, (name, (steps, values)) in enumerate(panel.lines.items()):
        if not steps:
            continue
        points = [(place_x(x), place_y(y)) for x, y in zip(steps, values, strict=True)]
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        curves.append(
            Curve(name, color, path, short_number(values[-1]), points[0] if len(points) == 1 else None)
        )
    return Chart(
        panel.title,
        panel.note,
        curves,
        [Tick(place_x(x), step_label(x)) for x in x_values],
        [Tick(place_y(y), label) for y, label in zip(y_values, _labels(y_values, log), strict=True)],
        None if panel.level is None else place_y(panel.level),
        {"x0": first, "x1": last, "y0": bottom, "y1": top, "log": int(log)},
    )


def step_label(step: float) -> str:
    """Format a step in a few characters: 500, 1,500, 20k, 1.5M."""
    if step >= 1e6:
        return f"{step / 1e6:g}M"
    return f"{step / 1e3:g}k" if step >= 1e4 else f"{step:,.10g}"


def short_number(value: float) -> str:
    """Format a value with three digits: 0.0178, 988, 3,110."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if 1e3 <= abs(rounded) < 1e6 else f"{rounded:g}"


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Return about ``count`` round values that cover the range."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    start, stop = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(start, stop + 1)]


def _log_ticks(low: float, high: float) -> Sequence[float]:
    """Return decades that cover the range, or 1, 2, 5 in each if the range is less than two decades."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first <= 2:
        values = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        start = max((v for v in values if v <= low * 1.0001), default=values[0])
        stop = min((v for v in values if v >= high * 0.9999), default=values[-1])
        return [v for v in values if start <= v <= stop]
    stride = -(-(last - first) // 6)
    return [10.0**e for e in range(first, last + stride, stride)]


def _labels(values: Sequence[float], log: bool) -> list[str]:
    """Format the ticks of an axis: of a log axis one by one, of a linear axis all in the same way."""
    if log:
        return [_number(v, 1) if v < 1e-3 or v >= 1e5 else f"{v:,.10g}" for v in values]
    largest = max(map(abs, values))
    if 1e-3 <= largest < 1e5:
        return [f"{v:,.10g}" for v in values]
    digits = math.ceil(math.log10(largest / (values[1] - values[0]))) + 1
    return [_number(v, digits) for v in values]


def _number(value: float, digits: int) -> str:
    """Format a value in the form 2.5e-4."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{float(mantissa):.{digits + 1}g}e{int(exponent)}"
