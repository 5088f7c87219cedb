"""Launches that take turns on a scratch memory of fixed size; see ``strips_triton``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from driftgen.drift.fused.shapes import BucketShape
from driftgen.drift.fused.tile_sizes import Tile
from driftgen.ops.launch import Launch

__all__ = ["StripSizes", "Strips", "TiledGradient", "plan_strips", "processors"]

# Bytes of scratch memory: at most about the L2 cache, at least enough to occupy a part of the GPU, and in
# between a share of the memory of inputs and outputs.
MAX_SCRATCH, SCRATCH_SHARE, MIN_SCRATCH = 40 * 2**20, 0.2, 4 * 2**20
# Time of the launches of a turn, and of the beginning and end of a program, in steps of its loop.
TURN, ENDS = 16, 6


@dataclass(frozen=True)
class StripSizes:
    """Numbers of strips and sizes of their scratch memory.

    Attributes:
        strips: strips of all problems.
        slots: strips that the scratch memory holds.
        columns: column tiles of a strip.
        coefficients: elements of the coefficients of a strip.
        sums: elements of the partial sums of a strip.
    """

    strips: int
    slots: int
    columns: int
    coefficients: int
    sums: int


def plan_strips(
    shape: BucketShape, tile: Tile, matrices: int, values: int, before_outputs: bool, device: torch.device
) -> StripSizes:
    """Return the sizes of strips with a number of matrices, and of partial sums for each row.

    ``tile`` is that of the kernel that reads the strips. ``before_outputs`` says that memory for the outputs
    is not in use yet.
    """
    generated = shape.samples[0]
    columns = sum(-(-count // tile.columns) for count in shape.samples)
    coefficients, sums = matrices * tile.rows * columns * tile.columns, columns * values * tile.rows
    sample = shape.problems * shape.width * shape.dtype.itemsize
    share = SCRATCH_SHARE * (sum(shape.samples) + generated) * sample
    share += generated * sample if before_outputs else 0
    scratch = min(max(share, MIN_SCRATCH), MAX_SCRATCH)
    strips = shape.problems * -(-generated // tile.rows)
    size = coefficients * (4 if shape.direct else shape.dtype.itemsize) + 4 * sums
    parts, steps = -(-shape.width // tile.outer), columns * tile.columns // tile.inner
    most = max(1, min(strips, int(scratch) // size))
    slots = _best_slots(strips, most, parts, steps, processors(device))
    return StripSizes(strips, slots, columns, coefficients, sums)


def _best_slots(strips: int, most: int, parts: int, steps: int, processors: int) -> int:
    """Return the number of strips of a turn, up to ``most``, for which few processors are idle in few turns.

    A strip takes ``parts`` programs of ``steps`` steps.
    """

    def time(slots: int) -> int:
        turns, programs = -(-strips // slots), slots * parts
        return turns * (-(-programs // processors) * (steps + ENDS) + TURN)

    return min(range(most, 0, -1), key=time)


def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU; 1 for the CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True, eq=False)
class Strips:
    """Two launches, of which the first one writes strips and the second one reads them, in turns."""

    sizes: StripSizes
    writes: Launch
    reads: Launch
    starts: tuple[Tensor, ...]  # number of the first strip of each turn
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: BucketShape, sizes: StripSizes, writes: Launch, reads: Launch) -> Strips:
        """Return the launches with the numbers of first strips on their device."""
        # Two columns: each row is aligned to 16 bytes.
        numbers = torch.arange(0, sizes.strips, sizes.slots).repeat_interleave(2).view(-1, 2)
        starts = tuple(numbers.to(writes.device, non_blocking=True))
        return cls(sizes, writes, reads, starts, torch.float32 if shape.direct else shape.dtype)

    def __call__(self, written: list[Tensor], read: list[Tensor], last: list[Tensor]) -> None:
        """Launch all turns. Kernels take their tensors, then number of the first strip, coefficients and
        sums; the second one then takes ``last``.
        """
        device, slots = self.writes.device, self.sizes.slots
        coefficients = torch.empty(slots * self.sizes.coefficients, dtype=self.dtype, device=device)
        sums = torch.empty(slots * self.sizes.sums, dtype=torch.float32, device=device)
        for start in self.starts:
            self.writes(*written, start, coefficients, sums)
            self.reads(*read, start, coefficients, sums, *last)

    def prepare(self, written: list[torch.dtype], read: list[torch.dtype], last: list[torch.dtype]) -> None:
        """Compile the kernels in parallel, for tensors of these dtypes."""
        scratch = torch.int64, self.dtype, torch.float32
        self.writes.prepare(*written, *scratch)
        self.reads.prepare(*read, *scratch, *last)


@dataclass(frozen=True, eq=False)
class TiledGradient:
    """The gradient by strips. Takes the tensors of ``tiled_gradient_kernel``."""

    strips: Strips

    def __call__(self, *tensors: Tensor) -> None:
        """Write the gradient."""
        *inputs, upstream = tensors
        origin, table, owner, _, _, norms, _, sample_data, _ = inputs
        self.strips(inputs, [origin, table, owner, norms, sample_data, upstream], [])

    def prepare(self, *dtypes: torch.dtype) -> None:
        """Compile the kernels in parallel, for the dtypes of the tensors of a call."""
        *inputs, upstream = dtypes
        origin, table, owner, _, _, norms, _, sample_data, _ = inputs
        self.strips.prepare(inputs, [origin, table, owner, norms, sample_data, upstream], [])
