"""Figure of generated samples beside their nearest training images."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from driftgen.report.figures import GENERATED_COLOR, INK, STYLE
from driftgen.support.atomic_write import atomic_write

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes

__all__ = ["NeighborRow", "draw_neighbors"]

# All lengths are inches.
CHARACTER = 0.085  # width of an average character of the note
CELL, GAP, LINE, BETWEEN, FOOT = 0.86, 0.07, 0.16, 0.25, 0.1
HEADING = 3.6  # width of the longest heading
LONGEST_NAME, LONGEST_BESIDE = 13, 4  # characters of a class name, and of one beside the similarity


@dataclass(frozen=True)
class NeighborRow:
    """One row of the figure: a sample and its nearest training images.

    Attributes:
        sample: uint8 ``[H, W]`` or ``[H, W, 3]``.
        name: class of the sample, "" if unknown.
        neighbors: training images, most similar first.
        similarities: one per training image.
        neighbor_names: class of each training image, "" if unknown.
    """

    sample: NDArray[np.uint8]
    name: str
    neighbors: Sequence[NDArray[np.uint8]]
    similarities: Sequence[float]
    neighbor_names: Sequence[str]


def draw_neighbors(
    blocks: Mapping[str, Sequence[NeighborRow]], path: Path, title: str, note: str, threshold: float
) -> None:
    """Draw blocks of rows side by side, each under its heading: the sample in an orange frame, then its
    nearest training images with their similarities. Similarities above the threshold are orange.
    """
    import matplotlib
    from matplotlib.figure import Figure

    columns = 1 + max(len(row.neighbors) for rows in blocks.values() for row in rows)
    height, width = next(iter(blocks.values()))[0].sample.shape[:2]
    cell = (CELL * min(1.0, width / height), CELL * min(1.0, height / width))
    longest = max(len(_short(row.name)) for rows in blocks.values() for row in rows)
    margin = 0.25 + 0.077 * longest
    block_width = margin + max(columns * (cell[0] + GAP), HEADING) + BETWEEN
    beside = all(
        len(name) <= LONGEST_BESIDE for rows in blocks.values() for row in rows for name in row.neighbor_names
    )
    row_height = cell[1] + LINE * (1 if beside else 2) + GAP
    full_width = max(len(blocks) * block_width, 7.0)
    notes = textwrap.wrap(note, int(full_width / CHARACTER))
    head = 1.3 + 0.22 * len(notes)
    size = (full_width, head + max(len(rows) for rows in blocks.values()) * row_height + FOOT)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, size[0])
        axes.set_ylim(size[1], 0)
        _text(axes, 0.15, 0.36, title, fontsize=15, fontweight="bold")
        for i, line in enumerate(notes):
            _text(axes, 0.15, 0.66 + 0.22 * i, line, fontsize=11)
        for i, (heading, rows) in enumerate(blocks.items()):
            left = i * block_width
            _text(axes, left + margin, head - 0.38, heading, fontsize=12, fontweight="bold")
            _text(axes, left + margin, head - 0.1, "sample", fontsize=10, color=GENERATED_COLOR)
            _text(axes, left + margin + cell[0] + 2 * GAP, head - 0.1, "training images", fontsize=10)
            for j, row in enumerate(rows):
                _row(axes, row, left + margin, head + j * row_height, cell, threshold, beside)
        # imshow adapts the limits to the last image.
        axes.set_xlim(0, size[0])
        axes.set_ylim(size[1], 0)
        with atomic_write(path) as scratch:
            figure.savefig(scratch, dpi=110, facecolor="white")


def _row(
    axes: Axes,
    row: NeighborRow,
    left: float,
    top: float,
    cell: tuple[float, float],
    threshold: float,
    beside: bool,
) -> None:
    width, height = cell
    _text(axes, left - 0.1, top + height / 2, _short(row.name), fontsize=9.5, ha="right", va="center")
    _image(axes, row.sample, left, top, cell, GENERATED_COLOR)
    texts = zip(row.neighbors, row.similarities, row.neighbor_names, strict=True)
    for k, (image, similarity, name) in enumerate(texts, start=1):
        # A wider gap separates the sample from real images.
        x = left + k * (width + GAP) + GAP
        _image(axes, image, x, top, cell, None)
        copied = similarity > threshold
        label = f"{similarity:.3f}"
        if name:
            label += f" ({name})" if beside else f"\n{_short(name)}"
        _text(
            axes,
            x + width / 2,
            top + height + 0.03,
            label,
            fontsize=8.5,
            ha="center",
            va="top",
            color=GENERATED_COLOR if copied else INK,
            fontweight="bold" if copied else "normal",
        )


def _image(
    axes: Axes,
    image: NDArray[np.uint8],
    left: float,
    top: float,
    cell: tuple[float, float],
    frame: str | None,
) -> None:
    from matplotlib.patches import Rectangle

    width, height = cell
    axes.imshow(
        image,
        cmap="gray",
        vmin=0,
        vmax=255,
        extent=(left, left + width, top + height, top),
        interpolation="nearest" if image.shape[0] <= 64 else "antialiased",
        aspect="auto",
    )
    color, line = ("#bbbbbb", 0.6) if frame is None else (frame, 2.0)
    axes.add_patch(Rectangle((left, top), width, height, fill=False, edgecolor=color, linewidth=line))


def _text(axes: Axes, x: float, y: float, text: str, **style: object) -> None:
    axes.text(x, y, text.replace("$", r"\$"), **style)  # type: ignore[arg-type]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
