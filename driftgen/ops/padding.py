"""Pad batches to few sizes, since each size of a compiled or captured call costs time and memory."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["batch_sizes", "batches", "pad_rows", "padded_size"]


def padded_size(count: int, most: int) -> int:
    """Return the size of a batch of ``count`` rows: the next power of two, at most ``most``."""
    return most if count >= most else min(most, 1 << (count - 1).bit_length())


def batch_sizes(most: int) -> list[int]:
    """Return all sizes of :func:`padded_size`, in ascending order."""
    return sorted({padded_size(count, most) for count in (*(1 << i for i in range(most.bit_length())), most)})


def batches(count: int, most: int) -> list[int]:
    """Return the sizes of the batches of ``count`` rows: all equal, so that the last one may be padded."""
    size = padded_size(count, most)
    return [size] * -(-count // size)


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """Pad to ``size`` rows by repeating the last one."""
    missing = size - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing, *rows.shape[1:])]) if missing > 0 else rows
