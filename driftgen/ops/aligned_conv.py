"""Convolution whose channels are padded to a multiple of 8, the alignment that tensor cores need.

Images have 3 channels, and 12 as patches of 2. For such numbers of channels cuDNN selects kernels without
tensor cores in bfloat16 and float16.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ALIGNMENT", "NARROW", "aligned_conv", "pad_channels", "supports_aligned_conv"]

ALIGNMENT = 8
NARROW = (torch.bfloat16, torch.float16)


def aligned_conv(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """y = weight * x + bias, the output of ``conv``."""
    return pad_channels(conv, x) if supports_aligned_conv(conv, x) else conv(x)


def supports_aligned_conv(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return True for 16-bit products on an NVIDIA GPU with channels that are no multiple of 8."""
    aligned = conv.in_channels % ALIGNMENT == 0 and conv.out_channels % ALIGNMENT == 0
    if aligned or x.device.type != "cuda" or torch.version.hip is not None:
        return False
    return (torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype) in NARROW


def pad_channels(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Pad the input, the weight and the bias with zeros, convolve, and drop the padded output channels."""
    inputs, outputs = -conv.in_channels % ALIGNMENT, -conv.out_channels % ALIGNMENT
    weight = F.pad(conv.weight, (0, 0, 0, 0, 0, inputs, 0, outputs))
    bias = None if conv.bias is None else F.pad(conv.bias, (0, outputs))
    x = F.pad(x, (0, 0, 0, 0, 0, inputs))
    return F.conv2d(x, weight, bias, conv.stride, conv.padding)[:, : conv.out_channels]
