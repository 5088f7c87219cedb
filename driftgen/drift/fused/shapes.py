"""What a call is like but for its tensors: the shape of each width, which the kernels cover or not, and how
they are built for it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from driftgen.drift.batching import Bucket
from driftgen.drift.interfaces import Settings
from driftgen.drift.kernels import gaussian, inverse_multiquadric, laplace
from driftgen.drift.normalization import both, over_y
from driftgen.ops.dispatch import device_guard, has_kernels, is_capturing, power_of_two

__all__ = ["BUILD", "KERNELS", "Numbers", "Shape", "block_of", "numbers_of", "supports_fused"]

KERNELS = (laplace, gaussian, inverse_multiquadric)  # in the order of their numbers
MOST_TEMPERATURES = 4
# The distances and coefficients of a problem stay in registers and shared memory.
MOST_GENERATED, MOST_OTHERS, MOST_PAIRS = 64, 128, 64 * 224
NARROW = 32  # up to this width differences cost less than tensor cores, which want 16 numbers at a time
# Numbers of a sample in a tile, warps, tiles under way, most registers; found by benchmarks/tune.py.
BUILD: dict[str, dict[str, int | None]] = {
    "scale_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    "products_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
    "gradient_kernel": {"BK": 64, "num_warps": 4, "num_stages": 3, "maxnreg": None},
}
DIRECT_TILE = 32  # numbers of a sample in a tile of float32: more would not fit beside A
FEW = 8  # up to so many generated samples rounding does not average out


def supports_fused(settings: Settings, buckets: list[Bucket]) -> bool:
    """Whether the kernels do this call: one 16- or 32-bit type for all samples of a width, normalised
    features, any kernel of the library, both-axis or y normalisation, up to four temperatures, up to 64
    generated samples in a group and 128 + 32 others. Weights, conventions, factors, widths and the number of
    groups are free. Distances are to lie between 1e-15 and 1e15, which a look at the samples would have to
    wait for.
    """
    return has_kernels(buckets[0].device) and all(
        _one_type(bucket) and _covers(settings, Shape.of(bucket)) for bucket in buckets
    )


@functools.lru_cache(maxsize=512)
def _covers(settings: Settings, shape: Shape) -> bool:
    # A set that is not there takes no place.
    sizes = [block_of(samples) for samples in shape.samples if samples]
    # 32-bit numbers are to count within one group of each feature.
    largest = max(shape.samples) * max(shape.vectors) * shape.width
    return (
        settings.normalize_features
        and settings.kernel in KERNELS
        and settings.normalization in (both, over_y)
        and len(settings.temperatures) <= MOST_TEMPERATURES
        and sizes[0] <= MOST_GENERATED
        and max(sizes) <= MOST_OTHERS
        and sizes[0] * sum(sizes) <= MOST_PAIRS
        and largest < 2**31
    )


def _one_type(bucket: Bucket) -> bool:
    found = {tensor.dtype for tensors in bucket.sets for tensor in tensors}
    return len(found) == 1 and found <= {torch.float32, torch.bfloat16, torch.float16}


def block_of(samples: int) -> int:
    """Rows of the tile that holds so many samples."""
    return max(16, power_of_two(samples))


@dataclass(frozen=True, eq=False)
class Shape:
    """Of a bucket, all but the tensors. Buckets alike share one, so that what hangs on it is found by what it
    is, without a look at its parts.
    """

    features: tuple[int, ...]  # positions in the call
    vectors: tuple[int, ...]  # of each feature
    width: int
    groups: int
    samples: tuple[int, int, int]  # generated, negatives, positives
    dtype: torch.dtype

    @classmethod
    def of(cls, bucket: Bucket) -> Shape:
        negatives = 0 if bucket.negatives is None else bucket.negatives[0].shape[1]
        samples = bucket.generated[0].shape[1], negatives, bucket.positives[0].shape[1]
        dtype = bucket.generated[0].dtype
        features, vectors = tuple(bucket.features), tuple(bucket.vectors)
        return _shape(features, vectors, bucket.width, bucket.groups, samples, dtype)

    @functools.cached_property
    def all_vectors(self) -> int:
        return sum(self.vectors)

    @functools.cached_property
    def first(self) -> list[int]:
        """The number of each feature's first vector."""
        return [0, *itertools.accumulate(self.vectors)][:-1]

    @property
    def problems(self) -> int:
        return self.groups * self.all_vectors

    def table(
        self, sets: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """For each feature: where its generated samples, negatives, positives and gradients lie, counted in
        numbers from the very first sample, how many vectors it has and the number of the first, how many
        vectors a group of each set is apart from the next, and its position in the call.
        """
        tensors = [tensor for tensors in sets for tensor in tensors]
        origin, apart = tensors[0].data_ptr(), tuple([tensor.stride(0) for tensor in tensors])
        tensors += gradients
        away = tuple([tensor.data_ptr() - origin for tensor in tensors])
        if is_capturing(device):
            return _recorded_table(_rows(self, away, apart), device)
        return _table(self, away, apart, device)

    def kept(self, temperatures: int) -> int:
        """Numbers that the products leave for the gradient of a problem; see ``passes_triton``."""
        bn, bm, bp = self.blocks
        return bn * (2 + 4 * temperatures) + (bm + bp) * (1 + temperatures)

    @functools.cached_property
    def left(self) -> int:
        """Numbers that the first pass leaves for the others; see ``distances_triton``."""
        return 1 if self.direct else sum(self.blocks) + 4

    @functools.cached_property
    def blocks(self) -> tuple[int, int, int]:
        """Rows of the tiles that hold the three sets."""
        n, m, p = (block_of(max(n, 1)) for n in self.samples)
        return n, m, p

    @functools.cached_property
    def direct(self) -> bool:
        """Whether distances come from differences, not from products on tensor cores."""
        return self.dtype == torch.float32 or self.width <= NARROW or self.samples[0] <= FEW

    def options(self, kernel: str) -> dict[str, Any]:
        """How a kernel is built for it."""
        import triton.language as tl

        types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        bn, bm, bp = self.blocks
        build = BUILD[kernel]
        many = bn * (bn + bm + bp) > 64 * 160
        if many or self.direct:
            build = build | {"num_warps": 16 if many and self.direct else 8, "num_stages": 2, "maxnreg": None}
        return build | {
            "WORK": tl.float32 if self.direct else types[self.dtype],
            "DIRECT": self.direct,
            "RAGGED": self.samples != self.blocks,
            "BN": bn,
            "BM": bm,
            "BP": bp,
            "BK": min(build["BK"] or 64, block_of(self.width), DIRECT_TILE if self.direct else 2**31),
        }


@functools.lru_cache(maxsize=512)
def _shape(
    features: tuple[int, ...],
    vectors: tuple[int, ...],
    width: int,
    groups: int,
    samples: tuple[int, int, int],
    dtype: torch.dtype,
) -> Shape:
    return Shape(features, vectors, width, groups, samples, dtype)


@dataclass(frozen=True)
class Numbers:
    """Of a bucket, on its device: the feature that each vector belongs to, counted within the bucket
    (``owner``) and within the call (``feature``); the positions in the call of its features; and a 1 for each
    feature and vector of it.
    """

    owner: Tensor
    feature: Tensor
    positions: Tensor
    member: Tensor


@functools.lru_cache(maxsize=64)
def numbers_of(shape: Shape, exact: torch.dtype, device: torch.device) -> Numbers:
    """Kept from call to call: on a GPU, making them takes longer than a small loss."""
    positions, each = torch.tensor(shape.features), torch.tensor(shape.vectors)
    owner = torch.arange(len(each)).repeat_interleave(each)
    member = owner == torch.arange(len(each))[:, None]
    found = (t.to(device, non_blocking=True) for t in (owner, positions[owner], positions, member.to(exact)))
    return Numbers(*found)


@functools.lru_cache(maxsize=256)
def _table(shape: Shape, away: tuple[int, ...], apart: tuple[int, ...], device: torch.device) -> Tensor:
    """``Shape.table``. Kept, since memory is often given out in the same places again."""
    return torch.tensor(_rows(shape, away, apart)).to(device, non_blocking=True)


def _recorded_table(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """As launches, since a CUDA graph would read the host's memory again with every replay."""
    from driftgen.drift.fused.statistics_triton import table_row

    table = torch.empty(len(rows), len(rows[0]), dtype=torch.int64, device=device)
    with device_guard(device):
        for row, numbers in zip(table, rows, strict=True):
            table_row[(1,)](row, *numbers, num_warps=1)
    return table


def _rows(shape: Shape, away: tuple[int, ...], apart: tuple[int, ...]) -> list[tuple[int, ...]]:
    """From bytes between the first tensor and each, and numbers between groups of each set."""
    count = len(shape.features)
    rows = [
        [byte // shape.dtype.itemsize for byte in away],
        [numbers // shape.width for numbers in apart],
    ]
    for row in rows:
        if not shape.samples[1]:
            row[count:count] = [0] * count
    rows[0] += [0] * (4 * count - len(rows[0]))
    columns = [row[i : i + count] for row in rows for i in range(0, len(row), count)]
    columns[4:4] = [list(shape.vectors), shape.first]
    return list(zip(*columns, shape.features, strict=True))
