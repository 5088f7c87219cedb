"""Checks of the arguments of the field and of the loss."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.checked_arguments import show_value
from driftgen.support.dense_tensors import check_dense
from driftgen.support.peak_memory import check_fits

__all__ = [
    "check_agreement",
    "check_factor",
    "check_pairs",
    "check_samples",
    "check_switch",
    "check_temperature",
    "check_weight",
]

LARGEST_FACTOR = 1e6  # of attraction and repulsion


def check_temperature(argument: str, temperature: float) -> float:
    """Return the temperature. Raises ``InputError`` unless it is positive and within the range of float32."""
    if not isinstance(temperature, Real) or not 1e-30 <= temperature <= 1e30:
        raise InputError(
            f"{argument}={show_value(temperature)} must be a positive number (from 1e-30 to 1e30)"
        )
    return float(temperature)


def check_factor(argument: str, factor: float) -> float:
    """Return the factor. Raises ``InputError`` unless it is a number of reasonable size."""
    if not isinstance(factor, Real) or not abs(factor) <= LARGEST_FACTOR:
        raise InputError(f"{argument}={show_value(factor)} must be a number from -1e6 to 1e6")
    return float(factor)


def check_samples(argument: str, samples: Tensor) -> Tensor:
    """Return the samples in at least float32. Checks type, shape and, on a CPU, finiteness."""
    if not isinstance(samples, Tensor):
        raise InputError(f"{argument} must be a torch.Tensor, got {type(samples).__name__}")
    check_dense(argument, samples)
    if not samples.is_floating_point():
        raise InputError(f"{argument} must hold floating-point numbers, got {samples.dtype}")
    if samples.ndim < 2 or samples.shape[-2] == 0 or samples.shape[-1] == 0:
        raise InputError(
            f"{argument} must have shape [..., n, D] with at least one sample, got {list(samples.shape)}"
        )
    # Reading the values would synchronize a GPU. There, a NaN shows in the result.
    if samples.device.type == "cpu" and not samples.isfinite().all():
        raise InputError(f"{argument} contains NaN or infinite values: remove or fix those samples")
    return samples.detach().to(torch.promote_types(samples.dtype, torch.float32))


def check_agreement(x: Tensor, positives: Tensor, negatives: Tensor) -> None:
    """Raise ``InputError`` unless all samples have the same device and width."""
    for argument, samples in (("positives", positives), ("negatives", negatives)):
        if samples.device != x.device:
            raise InputError(f"{argument} is on {samples.device}, but x is on {x.device}")
        if samples.shape[-1] != x.shape[-1]:
            raise InputError(f"{argument} has width {samples.shape[-1]}, but x has width {x.shape[-1]}")


def check_pairs(problems: int, n: int, t: int, size: int, device: torch.device) -> None:
    """Raise ``InputError`` if the pairs of ``n`` samples with ``t`` do not fit into the memory of a CPU.

    Args:
        problems: computed at a time.
        n: samples x of a problem.
        t: samples y that each x is compared with.
        size: bytes of a pair.
        device: of the samples. A GPU's own message names the sizes.
    """
    if device.type == "cpu":
        count = f", {problems:,} times at once," if problems > 1 else ""
        what = f"comparing {n:,} samples with {t:,}{count}"
        check_fits(what, problems * n * t * size, device, "pass fewer samples at a time")


def check_switch(argument: str, switch: bool) -> None:
    """Raise ``InputError`` unless the value is True or False."""
    if not isinstance(switch, bool):
        raise InputError(f"{argument}={show_value(switch)} must be True or False")


def check_weight(argument: str, weight: Tensor) -> None:
    """Raise ``InputError`` unless the weights are a tensor of numbers from 0 to 1e8 (checked on a CPU)."""
    if not isinstance(weight, Tensor):
        raise InputError(f"{argument} must be a torch.Tensor, got {type(weight).__name__}")
    check_dense(argument, weight)
    if weight.is_complex() or weight.dtype == torch.bool:
        raise InputError(f"{argument} must hold numbers, got {weight.dtype}")
    if weight.device.type == "cpu" and not ((weight >= 0) & (weight <= 1e8)).all():
        raise InputError(f"{argument} must be between 0 and 1e8")
