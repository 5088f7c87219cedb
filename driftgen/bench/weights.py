"""Random weights under which a network does something."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["randomize_zero_weights"]


@torch.no_grad()
def randomize_zero_weights(network: nn.Module, std: float) -> None:
    """Draws anew the weights that start at zero, so that gates are open and samples differ, as they do in
    training: with equal samples, all distances among them would be 0, and the loss another case.
    """
    for parameter in network.parameters():
        if parameter.ndim > 1 and not parameter.any():
            parameter.normal_(std=std)
