"""What the operators of Transformer blocks share: on which tensors kernels of our own run, and linear layers
whose bias gets its gradient from the operator that reads their result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from driftgen import devices

__all__ = ["VECTOR", "has_kernels", "is_plain", "linear_and_bias", "side_by_side"]

TYPES = (torch.float32, torch.bfloat16, torch.float16)
VECTOR = 8  # numbers of a thread side by side: 16 bytes of a 16-bit type


def has_kernels(x: Tensor) -> bool:
    """Whether kernels of our own run on the device of this tensor, and take its numbers."""
    # The first half is there for the compiler, which compiles again when it changes.
    return x.device.type in devices.DEVICES and x.dtype in TYPES and _can_run(x.device)


def _can_run(device: torch.device) -> bool:
    return devices.has_kernels(device)


# The compiler is to ask, not to look inside. ``torch.compiler.assume_constant_result`` says so too, but loads
# the whole compiler, and Triton with it, as soon as this module is imported.
_can_run._dynamo_marked_constant = True  # type: ignore[attr-defined]


def linear_and_bias(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """W x + b, and b where its gradient is still owed: W x + b was computed with b as a constant.

    The gradient of b is the sum of that of W x + b over all rows, for which PyTorch reads it once more. The
    operator that makes the gradient of W x + b sums it on the way, if it is given b. Layers other than
    ``nn.Linear`` owe nothing, nor does one with hooks, or whose bias is not trained.
    """
    if type(layer) is nn.Linear and is_plain(layer) and layer.bias is not None:
        bias = layer.bias
        if torch.is_grad_enabled() and bias.requires_grad:
            return F.linear(x, layer.weight, bias.detach()), bias
    return layer(x), None


def is_plain(*modules: nn.Module) -> bool:
    """Whether no hooks wait for a call of these modules: what they do may then be done without one."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
        for m in modules
    )


def side_by_side(modulation: Tensor) -> Tensor:
    """Scale, shift or gate with the numbers of a sample beside each other; samples may lie apart, as parts of
    one layer's output do.
    """
    return modulation if modulation.stride(-1) == 1 else modulation.contiguous()
