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

__all__ = ["KERNELS", "Kernel", "gaussian", "get_kernel", "inverse_multiquadric", "laplace"]

Kernel = Callable[[Tensor, float], Tensor]
"""``(distance, temperature) -> log k``, elementwise."""


def laplace(distance: Tensor, temperature: float) -> Tensor:
    """The paper's kernel, log k = −‖x − y‖ / τ (Eq. "kernel")."""
    return distance / -temperature


def gaussian(distance: Tensor, temperature: float) -> Tensor:
    """log k = −‖x − y‖² / (2τ²)."""
    return _ratio(distance, temperature).square().mul(-0.5)


def inverse_multiquadric(distance: Tensor, temperature: float) -> Tensor:
    """log k = −½ log(1 + ‖x − y‖² / τ²), the heavy-tailed k = 1 / √(1 + ‖x − y‖² / τ²)."""
    return torch.log1p(_ratio(distance, temperature).square()).mul(-0.5)


def _ratio(distance: Tensor, temperature: float) -> Tensor:
    # Its square stays within float32; nothing that far away counts.
    return (distance / temperature).clamp(max=1e18)


KERNELS: dict[str, Kernel] = {
    "laplace": laplace,
    "gaussian": gaussian,
    "inverse_multiquadric": inverse_multiquadric,
}


def get_kernel(kernel: str | Kernel) -> Kernel:
    """The kernel of that name; a function is returned as it is."""
    if callable(kernel):
        return kernel
    if kernel not in KERNELS:
        raise unknown_name("kernel", kernel, KERNELS)
    return KERNELS[kernel]
