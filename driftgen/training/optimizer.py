"""Gradient clipping by global norm, the optimizer, and the learning rate of each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from driftgen.training.config import Optimizer
from driftgen.training.muon import Muon

__all__ = ["clip", "learning_rate", "make_optimizer", "state_names"]

FIRST_RATE = 1e-6


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: Optimizer, *, embeddings: Collection[Tensor] = ()
) -> torch.optim.AdamW:
    """Return AdamW or Muon over every parameter; as in the release, biases and embeddings decay too."""
    trained = [p for p in parameters if p.requires_grad]
    options: dict[str, Any] = {
        "lr": FIRST_RATE,
        "betas": config.betas,
        "eps": 1e-8,
        "weight_decay": config.weight_decay,
        "fused": all(p.is_cuda for p in trained) or None,
    }
    if config.kind == "muon":
        return Muon(trained, embeddings=embeddings, momentum=config.momentum, **options)
    return torch.optim.AdamW(trained, **options)


def state_names(optimizer: torch.optim.AdamW, parameter: Tensor) -> set[str]:
    """Return the names of the state that the optimizer keeps for a parameter."""
    matrix = isinstance(optimizer, Muon) and optimizer.is_matrix(parameter)
    return {"step", "exp_avg"} if matrix else {"step", "exp_avg", "exp_avg_sq"}


def learning_rate(config: Optimizer, step: int) -> float:
    """Return the rate of update number ``step``: linear from 1e-6 to ``lr`` over ``warmup``, then a schedule.

    With n = ``steps``, w = ``warmup``, s = ``decay_share`` and f = ``final_lr``, the schedule is ``lr`` times

    - constant: 1,
    - decay: 1 - (1 - f) max(0, step - (1 - s) n) / (s n),
    - cosine: f + (1 - f) (1 + cos(π (step - w) / (n - w))) / 2.

    Both reach the share f after the last update. A warm-up that reaches into the decay is multiplied by it.
    """
    rate = config.lr
    if step < config.warmup:
        rate = FIRST_RATE + (config.lr - FIRST_RATE) * step / config.warmup
    return rate if config.schedule == "constant" else rate * _share(config, step)


def _share(config: Optimizer, step: int) -> float:
    """Return the rate of a schedule as a share of ``lr``."""
    length = config.decay_share * config.steps if config.schedule == "decay" else config.steps - config.warmup
    progress = min(1.0, max(0.0, step - (config.steps - length)) / length) if length > 0 else 0.0
    fall = progress if config.schedule == "decay" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - (1 - config.final_lr) * fall


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
