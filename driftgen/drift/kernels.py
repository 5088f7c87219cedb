"""Kernels k(x, y), the similarity of samples.

Each kernel is a function of the distance ‖x − y‖ and the temperature τ. It returns **log k**, because all
normalizations work on logits. To add a kernel, write such a function and pass it as ``kernel=``, or add it to
``KERNELS`` to give it a name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from driftgen.errors import unknown_name

__all__ = [
    "KERNELS",
    "Kernel",
    "farthest",
    "gaussian",
    "get_kernel",
    "inverse_multiquadric",
    "is_coarse",
    "laplace",
]

MAX_LOGIT = 5000.0  # at the mean distance; distances in float32 then change an affinity by less than 1e-3

Kernel = Callable[[Tensor, float], Tensor]
"""``(distance, temperature) -> log k``, elementwise. Distances are at most ``farthest(temperature)``."""


def laplace(distance: Tensor, temperature: float) -> Tensor:
    """Laplace kernel of the paper, log k = −‖x − y‖ / τ (Eq. "kernel")."""
    return distance / -temperature


def gaussian(distance: Tensor, temperature: float) -> Tensor:
    """Gaussian kernel, log k = −‖x − y‖² / (2τ²)."""
    return (distance / temperature).square().mul(-0.5)


def inverse_multiquadric(distance: Tensor, temperature: float) -> Tensor:
    """Heavy-tailed kernel k = 1 / √(1 + ‖x − y‖² / τ²), log k = −½ log(1 + ‖x − y‖² / τ²)."""
    return torch.log1p((distance / temperature).square()).mul(-0.5)


KERNELS: dict[str, Kernel] = {
    "laplace": laplace,
    "gaussian": gaussian,
    "inverse_multiquadric": inverse_multiquadric,
}


def farthest(temperature: float, dtype: torch.dtype = torch.float32, kernel: Kernel | None = None) -> float:
    """Return the distance to clamp to before a kernel, so that log k stays above that of a masked pair."""
    if dtype == torch.float32:
        return min(1e18 * temperature, 1e38)
    reach: dict[Kernel | None, float] = {laplace: 1e36, inverse_multiquadric: 1e150}
    return reach.get(kernel, 1e18) * temperature


def is_coarse(kernel: Kernel, temperature: float) -> bool:
    """Return True if the temperature, in units of the mean distance, is too low for float32 distances.

    A relative error ε of a distance changes log k by ε |log k|.
    """
    return bool(kernel(torch.ones(()), temperature) < -MAX_LOGIT)


def get_kernel(kernel: str | Kernel) -> Kernel:
    """Return the kernel of that name. A user's function is wrapped: it may return −∞ where k is 0."""
    if isinstance(kernel, str) and kernel in KERNELS:
        return KERNELS[kernel]
    if not callable(kernel):
        raise unknown_name("kernel", kernel, KERNELS)
    if kernel in KERNELS.values():
        return kernel
    lowest = torch.finfo(torch.float32).min

    @functools.wraps(kernel)
    def finite(distance: Tensor, temperature: float) -> Tensor:
        return kernel(distance, temperature).clamp(min=lowest)

    return finite
