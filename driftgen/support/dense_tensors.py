"""Kinds of tensors that the functions of the package compute with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["check_dense", "check_tensor"]


def check_dense(argument: str, tensor: Tensor, *, meta: bool = False) -> None:
    """Raise ``InputError`` for a sparse, nested, quantized, float8 or complex tensor, and for one on the meta
    device unless ``meta``.
    """
    if tensor.is_nested:
        raise InputError(f"{argument} is a nested tensor: pad it, as in torch.nested.to_padded_tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{argument} is sparse ({tensor.layout}): pass {argument}.to_dense()")
    if tensor.is_quantized:
        raise InputError(f"{argument} is quantized ({tensor.dtype}): pass {argument}.dequantize()")
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        raise InputError(f"{argument} has dtype {tensor.dtype}: pass {argument}.float()")
    if tensor.is_complex():
        raise InputError(
            f"{argument} has dtype {tensor.dtype}: pass {argument}.real, or both parts as numbers"
        )
    if tensor.is_meta and not meta:
        raise InputError(f"{argument} is on the meta device, without values: pass a tensor with values")


def check_tensor(argument: str, value: Any, like: Tensor, *, floating: bool | None = None) -> None:
    """Raise ``InputError`` unless a value is a dense tensor on the device of a network's weight ``like``.

    ``floating`` demands floating-point numbers, or integers.
    """
    if not isinstance(value, Tensor):
        raise InputError(f"{argument} must be a torch.Tensor, got {type(value).__name__}")
    check_dense(argument, value, meta=like.is_meta)  # shapes of features are computed on the meta device
    if value.device != like.device:
        raise InputError(f"{argument} is on {value.device}, the network on {like.device}: move one of them")
    if floating is not None and floating != value.is_floating_point():
        raise InputError(
            f"{argument} must hold {'floating-point numbers' if floating else 'integers'}, got {value.dtype}"
        )
