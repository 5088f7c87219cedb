"""Checksums of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["tensors_checksum", "weights_checksum"]


def tensors_checksum(tensors: Iterable[tuple[str, Tensor]], *texts: str) -> str:
    """Return a SHA-256 of named tensors in their order, with dtypes and shapes, and of ``texts``."""
    digest = hashlib.sha256()
    for name, value in tensors:
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for text in texts:
        digest.update(f"\n{len(text)} {text}".encode())
    return digest.hexdigest()


def weights_checksum(network: nn.Module) -> str:
    """Return a SHA-256 of the weights by name."""
    return tensors_checksum(network.state_dict().items())
