"""Figure of action chunks: generated ones beside the demonstrated one, for several observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.support.atomic_write import atomic_write, make_folder

__all__ = ["draw_chunks"]

Array = NDArray[Any]


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
