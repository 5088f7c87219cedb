"""Figures of action chunks: generated beside demonstrated ones, and several policies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from driftgen.policy.scenes import draw_scene
from driftgen.support.atomic_write import atomic_write, make_folder

__all__ = ["Panel", "draw_chunks", "draw_comparison"]

Array = NDArray[Any]


class Panel(NamedTuple):
    """Chunks of one source.

    Attributes:
        title: of the panel.
        caption: below the panel.
        chunks: ``[N, T, A]``.
        color: of the lines.
    """

    title: str
    caption: str
    chunks: Array
    color: str = "tab:blue"


def draw_chunks(chunks: Array, demonstrated: Array, path: Path, columns: int = 3) -> Path:
    """Draw chunks ``[n, N, T, A]`` and demonstrated ones ``[n, T, A]`` to a PNG file, one panel each.

    The first two dimensions of an action are a path in the plane; with one dimension, it is drawn over time.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    n, rows = len(chunks), -(-len(chunks) // columns)
    figure = Figure(figsize=(3.2 * columns, 2.9 * rows))
    figure.subplots_adjust(0.06, 0.06, 0.98, 0.88, 0.22, 0.25)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for i, axis in enumerate(axes):
        if i >= n:
            axis.axis("off")
            continue
        lines = [np.stack(_plane(chunk), axis=1) for chunk in chunks[i]]
        axis.add_collection(LineCollection(lines, color="tab:blue", alpha=0.35, linewidth=1))
        axis.autoscale()
        x, y = _plane(demonstrated[i])
        axis.plot(x, y, color="black", linewidth=1.6)
        axis.plot(x[:1], y[:1], "o", color="black", markersize=4)
        axis.set_title(f"held-out observation {i + 1}", fontsize=9)
        axis.tick_params(labelsize=7)
        if demonstrated.shape[2] > 1:
            axis.set_aspect("equal", adjustable="datalim")
    figure.suptitle("generated chunks (blue) and the demonstrated one (black, from the dot)", fontsize=10)
    make_folder(path.parent)
    with atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=100)
    return path


def _plane(chunk: Array) -> tuple[Array, Array]:
    return (chunk[:, 0], chunk[:, 1]) if chunk.shape[1] > 1 else (np.arange(len(chunk)), chunk[:, 0])


def draw_comparison(panels: Sequence[Panel], state: Array, environment: str | None, path: Path) -> Path:
    """Draw the chunks of several sources from one observation to a PNG file, side by side on equal axes.

    Args:
        panels: chunks and titles.
        state: last state of the observation ``[S]``.
        environment: draws its scene, see :func:`~driftgen.policy.scenes.draw_scene`.
        path: file to write.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.9 * len(panels), 3.1), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=True, sharey=True).ravel()
    ends = np.concatenate([np.concatenate(_lines(panel.chunks)) for panel in panels])
    low, high = ends.min(axis=0), ends.max(axis=0)
    margin = 0.08 * (high - low).max() + 1e-6
    for axis, panel in zip(axes, panels, strict=True):
        draw_scene(axis, environment, state)
        axis.add_collection(
            LineCollection(_lines(panel.chunks), color=panel.color, alpha=0.45, linewidth=1.1, zorder=2)
        )
        starts = np.array([line[0] for line in _lines(panel.chunks)])
        axis.plot(starts[:, 0], starts[:, 1], "o", color=panel.color, markersize=2.5, zorder=3)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel(panel.caption, fontsize=8)
        axis.tick_params(labelsize=7)
        axis.locator_params(nbins=4)
        axis.set_xlim(low[0] - margin, high[0] + margin)
        axis.set_ylim(low[1] - margin, high[1] + margin)
        if panel.chunks.shape[2] > 1:
            axis.set_aspect("equal", adjustable="box")
    make_folder(path.parent)
    with atomic_write(path) as scratch:
        figure.savefig(scratch, format="png", dpi=120)
    return path


def _lines(chunks: Array) -> list[Array]:
    return [np.stack(_plane(chunk), axis=1) for chunk in chunks]
