"""Figures and animations of a drifting distribution: data in blue, generated points in orange."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from driftgen.support.atomic_write import atomic_write
from driftgen.training.toy_study import Evolution

if TYPE_CHECKING:  # importing matplotlib takes a second, so only the drawing functions import it
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["DATA_COLOR", "GENERATED_COLOR", "draw_comparison", "draw_evolution", "write_animation"]

DATA_COLOR = "#2f6fb7"
GENERATED_COLOR = "#f0820f"
INK = "#333333"
PANELS = 6
Box = tuple[float, float, float, float]
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 13,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#bbbbbb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


def draw_evolution(evolution: Evolution, path: Path, title: str) -> None:
    """Draw samples at several steps above the mean squared drift on log axes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        shown = _spread(list(evolution.frames), PANELS)
        box = _limits(evolution)
        shape = (box[3] - box[2]) / (box[1] - box[0])
        figure = Figure(figsize=(15, 3.4 + 2.5 * shape), layout="constrained")
        rows = figure.add_gridspec(2, PANELS, height_ratios=[2.5 * shape, 2.3])
        for column, step in enumerate(shown):
            axes = figure.add_subplot(rows[0, column])
            _scatter(axes, evolution.data, evolution.frames[step], box)
            axes.set_title(f"step {step}", fontsize=14)
        curve = figure.add_subplot(rows[1, :])
        _curve(curve, evolution, shown)
        figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=16, fontweight="bold")
        figure.legend(
            handles=_handles(),
            loc="upper right",
            bbox_to_anchor=(1, 1),
            ncols=2,
            fontsize=14,
            handletextpad=0.1,
            columnspacing=1.2,
            borderpad=0.1,
        )
        _save(figure, path)


def draw_comparison(runs: dict[str, Evolution], path: Path, title: str) -> None:
    """Draw the final samples of several runs side by side, with their energy distances."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        box = _box(next(iter(runs.values())).data.numpy(), 0.6)
        shape = (box[3] - box[2]) / (box[1] - box[0])
        figure = Figure(figsize=(2.5 * len(runs), 1.6 + 2.5 * shape), layout="constrained")
        axes = figure.subplots(1, len(runs), squeeze=False)
        for panel, (name, run) in zip(axes[0], runs.items(), strict=True):
            _scatter(panel, run.data, run.frames[max(run.frames)], box)
            panel.set_title(name, fontsize=13)
            panel.set_xlabel(f"energy distance {run.metrics['energy_distance']:.3f}", fontsize=12)
        figure.legend(handles=_handles(), loc="outside lower center", ncols=2, fontsize=14)
        figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=16, fontweight="bold")
        _save(figure, path)


def write_animation(evolution: Evolution, path: Path, title: str) -> None:
    """Write an animated GIF: samples on the left, the drift up to the current step on the right."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.2), dpi=80, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        steps = sorted(evolution.frames)
        box = _limits(evolution)
        figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=15, fontweight="bold")
        generated = _scatter(left, evolution.data, evolution.frames[steps[0]], box)
        (line,) = _curve(right, evolution, [])
        line.set_alpha(0.0)
        drift = _smooth(evolution.drift)
        (past,) = right.plot([], [], color=GENERATED_COLOR, linewidth=2)
        (marker,) = right.plot([], [], "o", color=GENERATED_COLOR, markersize=10, markeredgecolor=INK)
        left.set_title("data (blue), generated (orange)", fontsize=12)
        pictures = []
        for step in steps:
            generated.set_offsets(evolution.frames[step].numpy())
            at = max(step, 1)
            past.set_data(range(1, at + 1), drift[:at])
            marker.set_data([at], [drift[at - 1]])
            right.set_title(f"step {step}", fontsize=12)
            canvas.draw()
            pixels = np.asarray(canvas.buffer_rgba())[..., :3]
            pictures.append(Image.fromarray(pixels).quantize(64))
    duration = [80] * (len(pictures) - 1) + [1500]
    with atomic_write(path) as scratch:
        pictures[0].save(scratch, save_all=True, append_images=pictures[1:], duration=duration, loop=0)


def _scatter(axes: Axes, data: Tensor, generated: Tensor, box: Box) -> PathCollection:
    axes.scatter(data[:1200, 0], data[:1200, 1], s=9, color=DATA_COLOR, alpha=0.35, linewidths=0)
    points = axes.scatter(
        generated[:1200, 0], generated[:1200, 1], s=13, color=GENERATED_COLOR, alpha=0.8, linewidths=0
    )
    axes.set_xlim(box[0], box[1])
    axes.set_ylim(box[2], box[3])
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
    return points


def _curve(axes: Axes, evolution: Evolution, marked: list[int]) -> list[Line2D]:
    steps = np.arange(1, len(evolution.drift) + 1)
    axes.loglog(steps, np.maximum(evolution.drift, 1e-30), color=GENERATED_COLOR, linewidth=1, alpha=0.35)
    drift = _smooth(evolution.drift)
    lines: list[Line2D] = axes.loglog(steps, drift, color=GENERATED_COLOR, linewidth=2.5)
    for step in marked:
        at = max(step, 1)
        axes.plot([at], [drift[at - 1]], "o", color=GENERATED_COLOR, markersize=8, clip_on=False)
    axes.set_xlabel("training step" if evolution.config.generator else "step")
    axes.set_ylabel("loss = mean squared drift" if evolution.config.generator else "mean squared drift")
    axes.grid(visible=True, which="major", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.minorticks_off()
    return lines


def _smooth(drift: list[float]) -> np.ndarray:
    """Geometric mean over the last tenth of the steps so far: constant width on a log axis."""
    logs = np.log(np.maximum(drift, 1e-30))
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    last = np.arange(1, len(logs) + 1)
    first = last - np.maximum(last // 10, 1)
    smooth: np.ndarray = np.exp((sums[last] - sums[first]) / (last - first))
    return smooth


def _handles() -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], marker="o", linestyle="", markersize=9, color=color, label=label)
        for color, label in ((DATA_COLOR, "data"), (GENERATED_COLOR, "generated"))
    ]


def _limits(evolution: Evolution) -> Box:
    # Include the initial points; outliers of later steps do not affect the limits.
    start = evolution.frames[0].numpy()
    return _box(np.concatenate([evolution.data.numpy(), start]), 0.08)


def _box(points: np.ndarray, margin: float) -> Box:
    low, high = np.quantile(points, 0.001, axis=0), np.quantile(points, 0.999, axis=0)
    center, half = (low + high) / 2, (high - low) / 2 * (1 + margin)
    half = np.maximum(half, max(0.5 * half.max(), 1e-6))  # at most 2:1, since both axes have the same scale
    return center[0] - half[0], center[0] + half[0], center[1] - half[1], center[1] + half[1]


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib would parse a $ in a file name as math


def _spread(steps: list[int], count: int) -> list[int]:
    """Return ``count`` evenly spaced entries of the steps, including the first and the last."""
    places = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return sorted({sorted(steps)[i] for i in places})


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as scratch:
        figure.savefig(scratch, dpi=110, facecolor="white")
