"""How affinities are normalised: from logits log k(x_i, y_j) to the matrix A of Algorithm 2.

Rows are the samples x_i, columns the samples y_j (negatives and positives side by side). ``log_weight``
(``[..., 1, T]``, the paper's reading of weights) counts a column as w copies of itself in every sum over y;
the released code leaves it out and multiplies A afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.errors import unknown_name

__all__ = [
    "MASKED",
    "NORMALIZATIONS",
    "Affinity",
    "Normalization",
    "both",
    "get_normalization",
    "none",
    "over_y",
    "sinkhorn",
]

MASKED = torch.finfo(torch.float32).min
"""The logit of a pair that does not exist. Finite: a column of nothing but masked pairs must not become
NaN.
"""

NOTHING = -1e30  # a log-sum below this is one over masked pairs only

SINKHORN_STEPS = 50
SINKHORN_TOLERANCE = 1e-3


class Affinity(NamedTuple):
    """The matrix A = exp(log_factor) · values; ``log_factor`` is None where A needs no factor."""

    values: Tensor
    log_factor: Tensor | None = None


Normalization = Callable[[Tensor, Tensor | None], Affinity | Tensor]
"""``(logits [..., N, T], log_weight [..., 1, T] or None) -> A``; what it returns is overwritten."""


def both(logits: Tensor, log_weight: Tensor | None = None) -> Affinity:
    """A = √(softmax_y · softmax_x), the geometric mean of both softmaxes (Algorithm 2)."""
    # Two roots, not the root of the product: that would underflow where A itself does not.
    return Affinity(_softmax_y(logits, log_weight).sqrt_().mul_(logits.softmax(dim=-2).sqrt_()))


def over_y(logits: Tensor, log_weight: Tensor | None = None) -> Affinity:
    """A = softmax over the y samples, k / Z with Z = Σ_y k (Eq. "Z"; "softmax over y" in the paper's
    ablation).
    """
    return Affinity(_softmax_y(logits, log_weight))


def none(logits: Tensor, log_weight: Tensor | None = None) -> Affinity:
    """A = k, so Z = 1. The largest k of each problem is kept apart: at low temperatures k·k leaves
    float32.
    """
    largest = logits.amax(dim=(-2, -1), keepdim=True)
    return Affinity((logits - largest).exp_(), largest)


def sinkhorn(
    logits: Tensor,
    log_weight: Tensor | None = None,
    *,
    steps: int = SINKHORN_STEPS,
    tolerance: float = SINKHORN_TOLERANCE,
) -> Affinity:
    """A = exp(log k − f_i − g_j) with rows that sum to 1 and columns that all sum alike (to N / T).

    The two softmaxes alternate in log space, at most ``steps`` times. A problem rests as soon as its column
    sums agree to ``tolerance`` (relative), each by itself, so that a result does not depend on what else is
    in the batch.
    """
    log_column_sum: float | Tensor = math.log(logits.shape[-2] / logits.shape[-1])
    if log_weight is not None:
        log_column_sum = math.log(logits.shape[-2]) - log_weight.logsumexp(dim=-1, keepdim=True)
    g = torch.zeros_like(logits[..., :1, :])
    rests = torch.zeros_like(logits[..., :1, :1], dtype=torch.bool)
    for _ in range(steps):
        f = _log_sum(logits - g, -1, log_weight)
        moved = _log_sum(logits - f, -2) - log_column_sum
        rests |= (moved - g).abs().amax(-1, keepdim=True) < tolerance
        g = torch.where(rests, g, moved)
        if rests.all():
            break
    scaled = logits - g
    return Affinity((scaled - _log_sum(scaled, -1, log_weight)).exp_())


NORMALIZATIONS: dict[str, Normalization] = {"both": both, "y": over_y, "none": none, "sinkhorn": sinkhorn}


def get_normalization(normalization: str | Normalization) -> Normalization:
    """The normalisation of that name; a function is returned as it is (it may also return A as a plain
    tensor).
    """
    if isinstance(normalization, str) and normalization in NORMALIZATIONS:
        return NORMALIZATIONS[normalization]
    if not callable(normalization):
        raise unknown_name("normalization", normalization, NORMALIZATIONS)
    return normalization


def _softmax_y(logits: Tensor, log_weight: Tensor | None) -> Tensor:
    """k / Σ_y w·k for each x."""
    if log_weight is None:
        return logits.softmax(dim=-1)
    log_sum = torch.logsumexp(logits + log_weight, dim=-1, keepdim=True)
    # Where nothing has weight there is nothing to normalise by, and nothing to pull.
    # Only what has no weight can lie so far above the sum: it must stay finite to be worth nothing.
    return torch.where(log_sum > NOTHING, (logits - log_sum).clamp_(max=80).exp_(), 0.0)


def _log_sum(logits: Tensor, dim: int, log_weight: Tensor | None = None) -> Tensor:
    if log_weight is not None:
        logits = logits + log_weight
    # The bound keeps a column of masked pairs masked: MASKED minus the sum stays far below any logit.
    return torch.logsumexp(logits, dim=dim, keepdim=True).clamp_(min=NOTHING)
