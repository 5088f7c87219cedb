"""Pictures of a drifting distribution: data blue, generated orange."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from driftgen.support.atomic_write import atomic_write
from driftgen.training.toy_study import Evolution

if TYPE_CHECKING:  # matplotlib takes a second to import and is loaded where a figure is drawn
    from matplotlib.axes import Axes
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

__all__ = ["DATA_COLOUR", "GENERATED_COLOUR", "draw_comparison", "draw_evolution", "write_animation"]

DATA_COLOUR = "#2f6fb7"
GENERATED_COLOUR = "#f0820f"
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
    """Samples at several steps above, the mean squared drift on a log axis below."""
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
        curve.legend(handles=_handles(), loc="upper right", fontsize=14, handletextpad=0.1)
        figure.suptitle(_plain(title), x=0.01, ha="left", fontsize=16, fontweight="bold")
        _save(figure, path)


def draw_comparison(runs: dict[str, Evolution], path: Path, title: str) -> None:
    """The last samples of several runs side by side, with their energy distance."""
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
    """The same as an animated GIF: samples on the left, the drift so far on the right."""
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
        (past,) = right.plot([], [], color=GENERATED_COLOUR, linewidth=2)
        (marker,) = right.plot([], [], "o", color=GENERATED_COLOUR, markersize=10, markeredgecolor=INK)
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
    axes.scatter(data[:1200, 0], data[:1200, 1], s=9, color=DATA_COLOUR, alpha=0.35, linewidths=0)
    points = axes.scatter(
        generated[:1200, 0], generated[:1200, 1], s=13, color=GENERATED_COLOUR, alpha=0.8, linewidths=0
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
    axes.loglog(steps, np.maximum(evolution.drift, 1e-30), color=GENERATED_COLOUR, linewidth=1, alpha=0.35)
    drift = _smooth(evolution.drift)
    lines: list[Line2D] = axes.loglog(steps, drift, color=GENERATED_COLOUR, linewidth=2.5)
    for step in marked:
        at = max(step, 1)
        axes.plot([at], [drift[at - 1]], "o", color=GENERATED_COLOUR, markersize=8, clip_on=False)
    axes.set_xlabel("training step" if evolution.config.generator else "step")
    axes.set_ylabel("loss = mean squared drift" if evolution.config.generator else "mean squared drift")
    axes.grid(visible=True, which="major", color="#e6e6e6")
    axes.set_axisbelow(True)
    axes.minorticks_off()
    return lines


def _smooth(drift: list[float]) -> np.ndarray:
    """Geometric mean over a tenth of the steps so far, which is even on a log axis."""
    logs = np.log(np.maximum(drift, 1e-30))
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    last = np.arange(1, len(logs) + 1)
    first = last - np.maximum(last // 10, 1)
    smooth: np.ndarray = np.exp((sums[last] - sums[first]) / (last - first))
    return smooth


def _handles() -> list[Line2D]:
    from matplotlib.lines import Line2D

    return [
        Line2D([], [], marker="o", linestyle="", markersize=9, color=colour, label=label)
        for colour, label in ((DATA_COLOUR, "data"), (GENERATED_COLOUR, "generated"))
    ]


def _limits(evolution: Evolution) -> Box:
    # The beginning belongs in the picture; stray points on the way do not decide its size.
    start = evolution.frames[0].numpy()
    return _box(np.concatenate([evolution.data.numpy(), start]), 0.08)


def _box(points: np.ndarray, margin: float) -> Box:
    low, high = np.quantile(points, 0.001, axis=0), np.quantile(points, 0.999, axis=0)
    centre, half = (low + high) / 2, (high - low) / 2 * (1 + margin)
    half = np.maximum(half, max(0.5 * half.max(), 1e-6))  # equal axes, no needless emptiness
    return centre[0] - half[0], centre[0] + half[0], centre[1] - half[1], centre[1] + half[1]


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # a file name is no formula


def _spread(steps: list[int], count: int) -> list[int]:
    """``count`` of the steps, first and last included, evenly along the list."""
    places = np.linspace(0, len(steps) - 1, count).round().astype(int)
    return sorted({sorted(steps)[i] for i in places})


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as scratch:
        figure.savefig(scratch, dpi=110, facecolor="white")
