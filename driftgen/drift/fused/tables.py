"""Feature tables: the memory layout of the features of a bucket, as the kernels read it.

One row for each feature, with the columns of ``distances_triton``: offsets of the three sets and of the
gradient from the first tensor, in elements; the number of vectors and the index of the first one; strides
between groups, in vectors; the position of the feature in the call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from driftgen.drift.fused.shapes import BucketShape
from driftgen.ops.dispatch import device_guard, is_capturing

__all__ = ["feature_table"]


def feature_table(
    shape: BucketShape, sets: Sequence[Sequence[Tensor]], gradients: Sequence[Tensor], device: torch.device
) -> Tensor:
    """Return the table of a bucket's generated, negative and positive samples, and of their gradients."""
    tensors = [tensor for features in sets for tensor in features]
    origin = tensors[0].data_ptr()
    group_strides = tuple([tensor.stride(0) for tensor in tensors])
    tensors += gradients
    offsets = tuple([tensor.data_ptr() - origin for tensor in tensors])
    if is_capturing(device):
        return _captured_table(_rows(shape, offsets, group_strides), device)
    return _cached_table(shape, offsets, group_strides, device)


@functools.lru_cache(maxsize=256)
def _cached_table(
    shape: BucketShape, offsets: tuple[int, ...], group_strides: tuple[int, ...], device: torch.device
) -> Tensor:
    """Cached, because the allocator often returns the same addresses again."""
    return torch.tensor(_rows(shape, offsets, group_strides)).to(device, non_blocking=True)


def _captured_table(rows: list[tuple[int, ...]], device: torch.device) -> Tensor:
    """Write the table with kernel launches: a captured copy would read host memory with every replay."""
    from driftgen.drift.fused.statistics_triton import table_row

    table = torch.empty(len(rows), len(rows[0]), dtype=torch.int64, device=device)
    with device_guard(device):
        for row, values in zip(table, rows, strict=True):
            table_row[(1,)](row, *values, num_warps=1)
    return table


def _rows(
    shape: BucketShape, offsets: tuple[int, ...], group_strides: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """Rows of the table from byte offsets and from strides in elements."""
    count = len(shape.features)
    in_elements = [offset // shape.dtype.itemsize for offset in offsets]
    in_vectors = [stride // shape.width for stride in group_strides]
    for values in (in_elements, in_vectors):
        if not shape.samples[1]:
            values[count:count] = [0] * count
    in_elements += [0] * (4 * count - len(in_elements))
    columns = [
        values[i : i + count] for values in (in_elements, in_vectors) for i in range(0, len(values), count)
    ]
    columns[4:4] = [list(shape.vectors), shape.first_vectors]
    return list(zip(*columns, shape.features, strict=True))
