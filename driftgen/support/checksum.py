"""Checksums of weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

__all__ = ["weights_checksum"]


def weights_checksum(network: nn.Module) -> str:
    """Return a SHA-256 of the weights by name."""
    digest = hashlib.sha256()
    for name, value in network.state_dict().items():
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
