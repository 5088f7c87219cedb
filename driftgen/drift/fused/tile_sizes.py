"""Tile sizes and compiler options of the kernels for large groups.

``TILES`` has a few rows for each kernel. A row applies from a width and a number of generated samples on; the
last row that applies is used. ``python -m benchmarks.tune tiles`` finds the rows of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from driftgen.drift.fused.shapes import BucketShape, block_size

__all__ = ["DIRECT", "STRIPS", "TILES", "Tile", "find_strip_tiles", "find_tile"]


@dataclass(frozen=True)
class Tile:
    """Sizes of the tiles of a kernel, and its compiler options.

    Attributes:
        rows: samples of the tile that a program keeps.
        columns: samples of a tile that it sweeps over.
        inner: elements of a sample that are multiplied at a time for distances.
        outer: coordinates of the drift that a program computes from a strip. It multiplies ``inner`` samples
            at a time; its rows and columns are those of the strip. Other programs compute all coordinates.
        strips: do not launch this kernel, but those that write strips of coefficients and read them.
        one_sweep: rows are generated samples alone, and add up the sums of columns, too (softmax).
        warps: warps of a program.
        stages: pipeline stages.
        registers: maximum registers of a thread; None for any.
        from_width: least width that the row applies to.
        from_generated: least number of generated samples that the row applies to.
    """

    rows: int = 64
    columns: int = 64
    inner: int = 64
    outer: int = 64
    strips: bool = False
    one_sweep: bool = False
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    from_width: int = 1
    from_generated: int = 1

    def applies(self, width: int, generated: int) -> bool:
        """Return True if the row applies to a shape."""
        return width >= self.from_width and generated >= self.from_generated

    def options(self) -> dict[str, Any]:
        """Compiler options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


# By kernel. Tensor cores take 64 rows for each four warps. Eight warps share the columns of 64 rows, unless a
# tile holds whole samples: then the compiler gives both halves the same work. Tiles of whole samples
# (``inner`` is the width) keep their rows, are loaded ahead, and serve for distances and drifts. Large tiles
# load samples less often. Small tiles and few registers let several programs share a multiprocessor, so that
# one computes affinities while another one waits for samples; and sets fill them more often, which saves
# masks.
TILES: dict[str, tuple[Tile, ...]] = {
    "center": (Tile(rows=64, warps=8),),
    "norms": (Tile(),),
    "scale": (
        Tile(rows=128, columns=64, warps=4),
        Tile(rows=128, columns=64, warps=8, registers=128, from_width=128),
        Tile(rows=64, columns=128, warps=4, from_width=256),
    ),
    # One sweep saves distances and costs exponentials, fewer of them for wide vectors.
    "softmax": (
        Tile(rows=64, columns=64, warps=4),
        Tile(rows=128, columns=64, warps=8, from_generated=384),
        Tile(rows=64, columns=64, inner=128, warps=4, registers=168, from_width=65),
        Tile(rows=64, columns=64, warps=4, registers=128, from_width=129),
        Tile(rows=128, columns=128, warps=8, one_sweep=True, from_width=512),
        Tile(rows=64, columns=128, warps=8, registers=128, from_width=512, from_generated=384),
    ),
    "products": (Tile(rows=64, columns=64, warps=4), Tile(strips=True, from_width=65)),
    "affinity_strips": (
        Tile(rows=64, columns=64, warps=4, registers=128),
        Tile(rows=64, columns=128, warps=8, registers=128, from_width=512, from_generated=384),
    ),
    "strip_products": (Tile(inner=64, outer=64, warps=4),),
    "gradient": (
        Tile(rows=64, columns=64, warps=4),
        Tile(rows=64, columns=64, inner=128, warps=4, from_width=65),
        Tile(rows=64, columns=32, inner=256, warps=4, stages=2, from_width=129),
        Tile(strips=True, from_width=257),
    ),
    "gradient_strips": (
        Tile(rows=64, columns=64, warps=4, registers=128),
        Tile(rows=64, columns=128, warps=8, registers=128, from_width=512, from_generated=384),
    ),
    "strip_gradient": (Tile(inner=64, outer=128, warps=4),),
}
# If distances are computed from differences, in float32.
DIRECT: dict[str, tuple[Tile, ...]] = {
    "scale": (Tile(warps=8, stages=2),),
    "softmax": (Tile(warps=8, stages=2),),
    "products": (Tile(columns=32, warps=8, stages=2), Tile(strips=True, from_width=33)),
    "affinity_strips": (Tile(warps=8, stages=2),),
    "strip_products": (Tile(inner=32, outer=64, warps=8, stages=2),),
    "gradient": (Tile(columns=32, warps=8, stages=2), Tile(strips=True, from_width=129)),
    "gradient_strips": (Tile(warps=8, stages=2),),
    "strip_gradient": (Tile(inner=32, outer=128, warps=8, stages=2),),
}
MAX_SUMS = 128  # elements of drifts that a thread sums, of its 255 registers
# Strips of each pass, and the kernels that write and read them.
STRIPS = {
    "products": ("affinity_strips", "strip_products"),
    "gradient": ("gradient_strips", "strip_gradient"),
}


def find_tile(kernel: str, shape: BucketShape) -> Tile:
    """Return the row of a kernel for a shape, with tiles no wider than the vectors."""
    table: Mapping[str, tuple[Tile, ...]] = DIRECT if shape.direct else TILES
    tile = [row for row in table[kernel] if row.applies(shape.width, shape.samples[0])][-1]
    widest = block_size(shape.width)
    return replace(tile, inner=min(tile.inner, widest), outer=min(tile.outer, widest))


def find_strip_tiles(kernel: str, shape: BucketShape, drifts: int) -> tuple[Tile, Tile]:
    """Return the tiles of the kernels that write and read the strips of a pass, with equal rows and columns.

    ``drifts`` is the number of drifts that the second one sums at the same time.
    """
    writes, reads = (find_tile(name, shape) for name in STRIPS[kernel])
    outer = reads.outer
    while drifts * writes.rows * outer > MAX_SUMS * 32 * reads.warps and outer > 16:
        outer //= 2
    inner = min(reads.inner, writes.columns)
    return writes, replace(reads, rows=writes.rows, columns=writes.columns, inner=inner, outer=outer)
