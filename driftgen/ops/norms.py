"""RMSNorm and LayerNorm of the last dimension, computed in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["EPSILON", "layer_norm", "rms_norm"]

EPSILON = 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / √(mean(x²) + 1e-6) · weight, rounded to the dtype of x."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), EPSILON).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """(x − mean(x)) / √(var(x) + 1e-6) · weight + bias, rounded to the dtype of x."""
    weight, bias = (None if p is None else p.float() for p in (weight, bias))
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, EPSILON).to(x.dtype)
