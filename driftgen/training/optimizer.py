"""The update: clip by the global norm, AdamW, a learning rate that warms up."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from driftgen.training.config import Optimizer

__all__ = ["clip", "learning_rate", "make_optimizer"]

FIRST_RATE = 1e-6


def make_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """AdamW over every parameter, biases and embeddings included, as the release decays them."""
    chosen = [p for p in parameters if p.requires_grad]
    fused = all(p.is_cuda for p in chosen)
    return torch.optim.AdamW(
        chosen,
        lr=FIRST_RATE,
        betas=config.betas,
        eps=1e-8,
        weight_decay=config.weight_decay,
        fused=fused or None,
    )


def learning_rate(config: Optimizer, step: int) -> float:
    """Of the update that follows ``step`` others: linear from 1e-6 over ``warmup`` steps, then constant."""
    if step >= config.warmup:
        return config.lr
    return FIRST_RATE + (config.lr - FIRST_RATE) * step / config.warmup


def clip(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scales gradients to a global norm of ``largest`` where it is above; returns the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    # As optax does: nothing is added to the norm, unlike in torch's own clipping.
    factor = (largest / norm).clamp(max=1.0)
    torch._foreach_mul_([_local(g) for g in gradients], factor)
    return norm


def _local(gradient: Tensor) -> Tensor:
    """The part of a gradient that this process holds: all of it, unless it is shared."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
