"""A convolution with a frozen weight: the weight is cast once, and the input is not saved for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from driftgen.ops.dispatch import has_kernels, is_capturing

__all__ = ["CastWeight", "frozen_conv", "supports_frozen_conv"]


class CastWeight:
    """Cache of a weight in another dtype and channels-last memory format, valid until the weight changes.

    An in-place change through ``weight.data`` is not noticed, because PyTorch does not count it. Copies of a
    module start with an empty cache.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop the copy. Called when the module is converted, since new memory may have the same address."""
        # The weight, its state and the copy in one attribute, since threads may share the cache.
        self.cached: tuple[Callable[[], Tensor | None], tuple[Any, ...], Tensor] | None = None

    def __call__(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight in this dtype, without gradient."""
        state = (weight.data_ptr(), weight._version, weight.device, weight.dtype, dtype)
        cached = self.cached
        if cached is not None and cached[1] == state and cached[0]() is weight:
            return cached[2]
        # A tensor created in inference mode could not be used in a backward pass later.
        with torch.inference_mode(False), torch.no_grad():
            plain = weight.detach()
            if weight.dtype == dtype and plain.stride() == _strides(plain):
                self.clear()
                return plain
            # ``copy``, since the strides of 1x1 kernels match every memory format.
            copy = plain.to(dtype, memory_format=torch.channels_last, copy=True)
        if not is_capturing(weight.device):  # a capture does not compute the copy
            self.cached = weakref.ref(weight), state, copy
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> CastWeight:
        return CastWeight()

    def __reduce__(self) -> tuple[type[CastWeight], tuple[()]]:
        return CastWeight, ()


def supports_frozen_conv(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return True if :func:`frozen_conv` applies: on a device with kernels, outside ``torch.compile``,
    without bias, and with a weight that needs no gradient.
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


def frozen_conv(conv: nn.Conv2d, x: Tensor, cache: CastWeight) -> Tensor:
    """y = weight * x in channels-last memory format, in the autocast dtype or that of x, with the gradient
    ∂x = weightᵀ * ∂y. Equal to ``conv(x)``. Requires :func:`supports_frozen_conv`.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    weight, x = cache(conv.weight, dtype), x.to(dtype)
    shape: tuple[Any, ...] = conv.stride, conv.padding, conv.dilation, conv.groups
    if x.requires_grad and torch.is_grad_enabled():
        return _FrozenConv.apply(x, weight, shape)  # type: ignore[no-any-return, no-untyped-call]
    return F.conv2d(x, weight, None, *shape)


class _FrozenConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: tuple[Any, ...]) -> Tensor:
        # PyTorch's convolution would save x too, which only the gradient of the weight needs.
        ctx.save_for_backward(weight)
        ctx.shape, ctx.size = shape, x.shape
        return F.conv2d(x, weight, None, *shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        x = grad
        if grad.shape != ctx.size:
            # The operator reads only shape, dtype and memory format of the input, and returns the gradient in
            # that format. An expanded scalar would have another format.
            x = torch.empty(ctx.size, dtype=grad.dtype, device=grad.device, memory_format=torch.channels_last)
        stride, padding, dilation, groups = ctx.shape
        grad_x, _, _ = torch.ops.aten.convolution_backward(
            grad, x, weight, None, stride, padding, dilation, False, (0, 0), groups, (True, False, False)
        )
        return grad_x, None, None


def _strides(weight: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense tensor in channels-last memory format."""
    _, c, h, w = weight.shape
    return c * h * w, 1, w * c, c
