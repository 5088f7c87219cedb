"""TF32 switched on or off for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["tf32"]


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32, which rounds the inputs of float32 products to 10 bits on an NVIDIA GPU."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
