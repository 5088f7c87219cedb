"""Random weights for benchmarks."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["randomize_zero_weights"]


@torch.no_grad()
def randomize_zero_weights(network: nn.Module, std: float) -> None:
    """Draw the weights that are initialized to zero, so that gates are open and samples differ.

    Equal samples would have distances of 0, which the loss treats as a special case.
    """
    for parameter in network.parameters():
        if parameter.ndim > 1 and not parameter.any():
            parameter.normal_(std=std)
