"""Small MAEs, deterministic golden weights, and conversions between layouts."""

import zlib

import numpy as np
import torch

from driftgen.features import ResNetMAE


def small_mae(**options):
    """Build a small encoder without a decoder."""
    return ResNetMAE(**{"in_channels": 3, "base_channels": 8, "blocks": (1, 1), "decoder": False} | options)


def recipe(path, shape):
    """Return the deterministic golden parameters of this path and shape."""
    n = np.random.RandomState(zlib.crc32(path.encode()) & 0xFFFFFFFF).standard_normal(shape)
    last = path.rsplit("/", 1)[-1]
    if last == "kernel":
        return (n * np.sqrt(2.0 / int(np.prod(shape[:-1])))).astype(np.float32)
    return (1.0 + 0.1 * n if last == "scale" else 0.1 * n).astype(np.float32)


def to_ours(array):
    tensor = torch.from_numpy(np.array(array))
    return tensor.permute({4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[tensor.ndim]).contiguous()


def to_theirs(tensor):
    return tensor.permute({4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[tensor.ndim]).contiguous()
