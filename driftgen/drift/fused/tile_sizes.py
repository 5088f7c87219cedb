"""Tile sizes and compiler options of the kernels for large groups.

``TILES`` has a few rows for each kernel. A row applies from a width and a number of generated samples on; the
last row that applies is used. ``python -m benchmarks.tune tiles`` finds the rows of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from driftgen.drift.fused.shapes import BucketShape, block_size

__all__ = ["DIRECT", "TILES", "Tile", "find_tile"]


@dataclass(frozen=True)
class Tile:
    """Sizes of the tiles of a kernel, and its compiler options.

    Attributes:
        rows: samples of the tile that a program keeps.
        columns: samples of a tile that it sweeps over.
        inner: elements of a sample that are multiplied at a time for distances.
        outer: coordinates of the drift that a program computes.
        defer: find the sums of A together with the products of drifts, without a sweep of their own.
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
    defer: bool = False
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
# tile holds whole samples: then the compiler gives both halves the same work. Wide vectors use 128 columns if
# registers allow it, because loops over products with 64 columns are bound by instructions.
TILES: dict[str, tuple[Tile, ...]] = {
    "center": (Tile(rows=32),),
    "norms": (Tile(),),
    "scale": (
        Tile(rows=128, columns=64, warps=4),
        Tile(rows=128, columns=128, warps=8, from_width=128),
    ),
    "softmax": (
        Tile(rows=128, columns=64, warps=8),
        Tile(rows=128, columns=128, warps=8, from_width=256),
    ),
    "affinity": (
        Tile(rows=128, columns=64, warps=8),
        Tile(rows=128, columns=128, warps=8, from_width=256),
    ),
    "products": (
        Tile(rows=64, columns=64, outer=64, defer=True, warps=4),
        Tile(rows=64, columns=64, outer=128, warps=8, from_width=65),
        Tile(rows=64, columns=128, outer=128, warps=8, from_width=256),
    ),
    "gradient": (
        Tile(rows=64, columns=64, outer=64, warps=4),
        Tile(rows=64, columns=64, inner=128, outer=128, warps=4, from_width=65),
        Tile(rows=64, columns=64, outer=256, warps=8, from_width=129),
    ),
}
# If distances are computed from differences, in float32.
DIRECT: dict[str, tuple[Tile, ...]] = {
    "scale": (Tile(warps=8, stages=2),),
    "softmax": (Tile(warps=8, stages=2),),
    "affinity": (Tile(warps=8, stages=2),),
    "products": (
        Tile(columns=32, outer=32, defer=True, warps=8, stages=2),
        Tile(columns=32, outer=64, warps=8, stages=2, from_width=33),
    ),
    "gradient": (
        Tile(columns=32, outer=32, warps=8, stages=2),
        Tile(columns=32, outer=64, warps=8, stages=2, from_width=33),
        Tile(columns=32, outer=128, warps=8, stages=2, from_width=65),
    ),
}


def find_tile(kernel: str, shape: BucketShape) -> Tile:
    """Return the row of a kernel for a shape, with tiles no wider than the vectors."""
    table: Mapping[str, tuple[Tile, ...]] = DIRECT if shape.direct else TILES
    tile = [row for row in table[kernel] if row.applies(shape.width, shape.samples[0])][-1]
    widest = block_size(shape.width)
    return Tile(**(vars(tile) | {"inner": min(tile.inner, widest), "outer": min(tile.outer, widest)}))
