"""Kinds of tensors that the functions of the package compute with."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["check_dense", "check_seed"]

MOST_BITS = 63


def check_dense(argument: str, tensor: Tensor) -> None:
    """Raise ``InputError`` for a sparse, nested, quantized or float8 tensor."""
    if tensor.is_nested:
        raise InputError(f"{argument} is a nested tensor: pad it, as in torch.nested.to_padded_tensor")
    if tensor.layout != torch.strided:
        raise InputError(f"{argument} is sparse ({tensor.layout}): pass {argument}.to_dense()")
    if tensor.is_quantized:
        raise InputError(f"{argument} is quantized ({tensor.dtype}): pass {argument}.dequantize()")
    if tensor.is_floating_point() and tensor.dtype.itemsize < 2:
        raise InputError(f"{argument} has dtype {tensor.dtype}: pass {argument}.float()")


def check_seed(argument: str, seed: Any) -> None:
    """Raise ``InputError`` unless a seed is None or an integer from 0 to 2^63 - 1."""
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= int(seed) < 2**MOST_BITS:
        raise InputError(f"{argument}={seed!r} must be an integer from 0 to 2^63 - 1")
