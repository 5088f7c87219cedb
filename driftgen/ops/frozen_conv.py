"""A convolution whose weight is not trained: the weight is cast once, and the input is not kept."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import has_kernels

__all__ = ["CastWeight", "frozen_conv", "supports_frozen_conv"]

# Output locations (of all samples together) for which cuDNN 9 picks a slow kernel. On an H200, bfloat16, 3x3
# kernels of 2048 channels, maps of 4x4: 512 samples (8192 locations) run at 342 TFLOP/s; 256 samples at 806,
# 384 at 808, 640 at 818, 768 and 1024 at 810. So two halves take 0.77 ms instead of 2.03 ms.
SLOW_LOCATIONS = 8192


class CastWeight:
    """A weight in another number type and channels-last, kept until the weight changes.

    A change in place through ``weight.data`` is not seen: PyTorch does not count those. Copies of a module
    start without it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the copy. For conversions of the module, which may find memory at the same address."""
        # The weight, its state, and the copy: one value, since threads may share this.
        self.kept: tuple[Callable[[], Tensor | None], tuple[Any, ...], Tensor] | None = None

    def __call__(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight in this type, without gradient."""
        state = (weight.data_ptr(), weight._version, weight.device, weight.dtype, dtype)
        kept = self.kept
        if kept is not None and kept[1] == state and kept[0]() is weight:
            return kept[2]
        # Of an inference mode's tensor no gradient could be taken later.
        with torch.inference_mode(False), torch.no_grad():
            plain = weight.detach()
            if weight.dtype == dtype and plain.stride() == _strides(plain):
                self.clear()
                return plain
            # ``copy``, since the strides of kernels of 1x1 would pass for any layout.
            found = plain.to(dtype, memory_format=torch.channels_last, copy=True)
        if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):  # not computed yet
            self.kept = weakref.ref(weight), state, found
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> CastWeight:
        return CastWeight()

    def __reduce__(self) -> tuple[type[CastWeight], tuple[()]]:
        return CastWeight, ()


def supports_frozen_conv(conv: nn.Conv2d, x: Tensor) -> bool:
    """Whether :func:`frozen_conv` does this: on a device with kernels, outside compilers, with a weight that
    is not trained, and without bias.
    """
    weight = conv.weight
    if torch.compiler.is_compiling() or not has_kernels(x.device):
        return False
    trained = weight.requires_grad and torch.is_grad_enabled()
    return (
        not trained
        and conv.bias is None
        and conv.padding_mode == "zeros"
        and not isinstance(conv.padding, str)
        and x.ndim == 4
        and x.device == weight.device
        and not weight.is_inference()
        and (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type))
        and x.dtype != torch.float64
    )


def frozen_conv(conv: nn.Conv2d, x: Tensor, kept: CastWeight) -> Tensor:
    """y = weight * x, channels-last, in the type that autocast asks for or else in that of x; the gradient
    is ∂x = weightᵀ * ∂y. Equal to ``conv(x)``; for what :func:`supports_frozen_conv`.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    weight, x = kept(conv.weight, dtype), x.to(dtype)
    shape = conv.stride, conv.padding, conv.dilation, conv.groups
    if x.requires_grad and torch.is_grad_enabled():
        found: Tensor = _FrozenConv.apply(x, weight, shape)  # type: ignore[no-untyped-call]
        return found
    return _convolved(x, weight, shape)


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: tuple[Any, ...]) -> Tensor:
        # PyTorch's own would keep x too, which only the gradient of the weight needs.
        ctx.save_for_backward(weight)
        ctx.shape, ctx.size = shape, x.shape
        return _convolved(x, weight, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        x = grad
        if grad.shape != ctx.size:
            # Only shape, type and layout of the input are looked at: the gradient is brought into the layout
            # of the input. So it is not an expanded number, but memory that is free again after the call.
            x = torch.empty(ctx.size, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        stride, padding, dilation, groups = ctx.shape
        found = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (True, False, False)
        )
        return found[0], None, None


def _convolved(x: Tensor, weight: Tensor, shape: tuple[Any, ...]) -> Tensor:
    if _on_a_gpu(x) and len(x) > 1 and _locations(x, weight, shape) == SLOW_LOCATIONS:
        return torch.cat([F.conv2d(half, weight, None, *shape) for half in x.chunk(2)])
    return F.conv2d(x, weight, None, *shape)


def _on_a_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _locations(x: Tensor, weight: Tensor, shape: tuple[Any, ...]) -> int:
    """Output locations of all samples."""
    stride, padding, dilation, _ = shape
    b, _, h, w = x.shape
    rows: int = (h + 2 * padding[0] - dilation[0] * (weight.shape[2] - 1) - 1) // stride[0] + 1
    columns: int = (w + 2 * padding[1] - dilation[1] * (weight.shape[3] - 1) - 1) // stride[1] + 1
    return b * rows * columns


def _strides(weight: Tensor) -> tuple[int, ...]:
    """Strides of a dense channels-last tensor."""
    _, c, h, w = weight.shape
    return c * h * w, 1, w * c, c
