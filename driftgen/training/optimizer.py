"""The update: gradient clipping by global norm, AdamW, learning rate warm-up."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from driftgen.training.config import Optimizer

__all__ = ["clip", "learning_rate", "make_optimizer"]

FIRST_RATE = 1e-6


def make_optimizer(parameters: Iterable[nn.Parameter], config: Optimizer) -> torch.optim.AdamW:
    """Return AdamW over every parameter; as in the release, biases and embeddings decay too."""
    trained = [p for p in parameters if p.requires_grad]
    fused = all(p.is_cuda for p in trained)
    return torch.optim.AdamW(
        trained,
        lr=FIRST_RATE,
        betas=config.betas,
        eps=1e-8,
        weight_decay=config.weight_decay,
        fused=fused or None,
    )


def learning_rate(config: Optimizer, step: int) -> float:
    """Return the rate of update number ``step``: linear from 1e-6, then constant after ``warmup``."""
    if step >= config.warmup:
        return config.lr
    return FIRST_RATE + (config.lr - FIRST_RATE) * step / config.warmup


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to a global norm of at most ``max_norm``; return the norm before."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    # As in optax: no epsilon is added to the norm, unlike in torch.nn.utils.clip_grad_norm_.
    factor = (max_norm / norm).clamp(max=1.0)
    torch._foreach_mul_([_local(g) for g in gradients], factor)
    return norm


def _local(gradient: Tensor) -> Tensor:
    """Return the local shard of a gradient, or the gradient if it is not sharded."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
