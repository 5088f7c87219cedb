"""Weights as 8-bit integers: w ≈ scale · q with one scale for each output channel, and q from -127 to 127."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["LEAST", "SCALE", "dequantize", "quantize"]

SCALE = ".int8_scale"  # suffix of the name of a tensor's scales
LARGEST = 127
LEAST = 1024  # elements; smaller tensors save nothing


def quantize(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each matrix and each convolution as int8, and its scales ``[channels]`` as ``NAME.int8_scale``.

    The scale of a channel is its largest magnitude / 127, so that a weight is off by at most half a scale.
    Vectors and small tensors stay as they are.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.numel() < LEAST:
            stored[name] = tensor
            continue
        rows = tensor.detach().float().flatten(1)
        scale = rows.abs().amax(1) / LARGEST
        steps = rows / torch.where(scale > 0, scale, 1.0)[:, None]
        stored[name] = steps.round().to(torch.int8).view(tensor.shape)
        stored[name + SCALE] = scale
    return stored


def dequantize(steps: Tensor, scale: Tensor) -> Tensor:
    """Return scale · q in float32; the inverse of :func:`quantize` up to rounding."""
    if steps.dtype != torch.int8 or scale.dtype != torch.float32 or scale.shape != steps.shape[:1]:
        scales, weights = (f"{list(t.shape)} of {t.dtype}" for t in (scale, steps))
        raise ValueError(f"scales {scales} do not fit weights {weights}")
    return steps.float() * scale.view(-1, *[1] * (steps.ndim - 1))
