"""Images in -1 ... 1 to the input of a pretrained network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.errors import InputError
from driftgen.features.pyramid import at_least_float32
from driftgen.support.dense_tensors import check_tensor

__all__ = ["check_images", "network_input"]


def check_images(x: Tensor, weight: Tensor) -> None:
    """Raise unless x is a batch of images of one or three channels in floating point, where ``weight`` is."""
    check_tensor("x", x, weight)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or 0 in x.shape:
        raise InputError(f"x has shape {list(x.shape)}, expected [B, 3, H, W] or [B, 1, H, W]")
    if not x.is_floating_point():
        raise InputError(f"x is {x.dtype}: convert it to floating point, scaled to -1 ... 1")


def network_input(
    x: Tensor, mean: Sequence[float], std: Sequence[float], size: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Compute ((x + 1) / 2 − mean) / std, ``[B, 3, *size]``, by antialiased bilinear interpolation.

    x has passed :func:`check_images`.
    """
    x = (at_least_float32(x).expand(-1, 3, -1, -1) + 1) / 2
    # Python floats instead of buffers: no copy to the device, no rounding to the dtype of the weights.
    channels = zip(x.unbind(1), mean, std, strict=True)
    x = torch.stack([(channel - m) / s for channel, m, s in channels], dim=1)
    if size != x.shape[2:]:
        x = F.interpolate(x, size=size, mode="bilinear", antialias=True, align_corners=False)
    return x.to(dtype)
