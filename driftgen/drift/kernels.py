"""Kernels k(x, y): what "near" means.

Each kernel is a function of the distance ‖x − y‖ and the temperature τ and returns **log k**, because every
normalisation works on logits. To add one, write such a function and pass it as ``kernel=``; give it a name
here when it proves useful.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from driftgen.errors import unknown_name

__all__ = ["KERNELS", "Kernel", "farthest", "gaussian", "get_kernel", "inverse_multiquadric", "laplace"]

Kernel = Callable[[Tensor, float], Tensor]
"""``(distance, temperature) -> log k``, elementwise. Distances are at most ``farthest(temperature)``."""


def laplace(distance: Tensor, temperature: float) -> Tensor:
    """The paper's kernel, log k = −‖x − y‖ / τ (Eq. "kernel")."""
    return distance / -temperature


def gaussian(distance: Tensor, temperature: float) -> Tensor:
    """log k = −‖x − y‖² / (2τ²)."""
    return (distance / temperature).square().mul(-0.5)


def inverse_multiquadric(distance: Tensor, temperature: float) -> Tensor:
    """log k = −½ log(1 + ‖x − y‖² / τ²), the heavy-tailed k = 1 / √(1 + ‖x − y‖² / τ²)."""
    return torch.log1p((distance / temperature).square()).mul(-0.5)


KERNELS: dict[str, Kernel] = {
    "laplace": laplace,
    "gaussian": gaussian,
    "inverse_multiquadric": inverse_multiquadric,
}


def farthest(temperature: float) -> float:
    """A distance beyond which nothing counts: the square of its ratio to τ still lies within float32."""
    return min(1e18 * temperature, 1e38)


def get_kernel(kernel: str | Kernel) -> Kernel:
    """The kernel of that name, or a function of one's own, which may return −∞ where k vanishes."""
    if isinstance(kernel, str) and kernel in KERNELS:
        return KERNELS[kernel]
    if not callable(kernel):
        raise unknown_name("kernel", kernel, KERNELS)
    if kernel in KERNELS.values():
        return kernel
    lowest = torch.finfo(torch.float32).min
    return lambda distance, temperature: kernel(distance, temperature).clamp(min=lowest)
