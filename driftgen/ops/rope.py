"""Rotary position embedding (RoPE) over the flat token index: its tables, and the rotation."""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.ops.dispatch import is_capturing, is_tracing

__all__ = ["cached_rope_tables", "rope_tables", "rotate"]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (a, b) = (first half, second half) of each head: (a cos − b sin, b cos + a sin).

    Computed in float32 and rounded to the dtype of x.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rope_tables(tokens: int, head: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines ``[tokens, head / 2]``, computed in float64 and stored in float32."""
    frequency = 10_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64, device=device) / head)
    angles = torch.arange(tokens, dtype=torch.float64, device=device)[:, None] * frequency
    return angles.cos().float(), angles.sin().float()


_TABLES: dict[tuple[int, int, torch.device], tuple[Tensor, Tensor]] = {}


def cached_rope_tables(tokens: int, head: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return :func:`rope_tables`, computed once per size and device.

    The cache never drops an entry, because CUDA graphs may read it.
    """
    if is_tracing():
        return rope_tables(tokens, head, device)
    tables = _TABLES.get((tokens, head, device))
    if tables is not None:
        return tables
    with torch.inference_mode(False):  # training cannot use tensors created in inference mode
        tables = rope_tables(tokens, head, device)
    if device.type in ("cpu", "cuda") and not is_capturing(device):
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # other streams will read the tables
        _TABLES[tokens, head, device] = tables
    return tables
