"""Normalization of affinities: from logits log k(x_i, y_j) to log A of Algorithm 2.

Rows are the samples x_i, columns the samples y_j (negatives, then positives). With ``log_weight``
``[..., 1, T]`` a column counts as w copies of itself in every sum over y, as the paper reads weights. The
released code passes None and multiplies A by the weights afterwards.
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
    "MIN_LOG_SUM",
    "NORMALIZATIONS",
    "LogAffinity",
    "Normalization",
    "both",
    "floored_both",
    "get_normalization",
    "none",
    "over_y",
    "sinkhorn",
]

MASKED = torch.finfo(torch.float32).min
"""Logit of a masked pair. Finite, so that a column of masked pairs does not become NaN."""

MIN_LOG_SUM = -1e37  # a log-sum below this has only masked pairs

SINKHORN_STEPS = 50
SINKHORN_TOLERANCE = 1e-3


class LogAffinity(NamedTuple):
    """log A. At low temperatures A itself underflows float32, also where the normalized drift does not."""

    values: Tensor


Normalization = Callable[[Tensor, Tensor | None], LogAffinity | Tensor]
"""``(logits [..., N, T], log_weight [..., 1, T] or None)`` to log A or A, which the caller overwrites."""


def both(logits: Tensor, log_weight: Tensor | None = None) -> LogAffinity:
    """Geometric mean of both softmaxes, A = √(softmax_y · softmax_x) (Algorithm 2)."""
    rows = _log_softmax_y(logits, log_weight)
    return LogAffinity(rows.add_(logits.log_softmax(dim=-2)).mul_(0.5))


def floored_both(logits: Tensor, floor: float) -> Tensor:
    """max(A, floor) of :func:`both`, as in the released code. No drift underflows with a floor."""
    # The product of two roots: the root of the product would underflow earlier.
    return logits.softmax(dim=-1).sqrt_().mul_(logits.softmax(dim=-2).sqrt_()).clamp_(min=floor)


def over_y(logits: Tensor, log_weight: Tensor | None = None) -> LogAffinity:
    """Softmax over y, A = k / Z with Z = Σ_y k (Eq. "Z"; "softmax over y" in the paper's ablation)."""
    return LogAffinity(_log_softmax_y(logits, log_weight))


def none(logits: Tensor, log_weight: Tensor | None = None) -> LogAffinity:
    """No normalization, A = k."""
    return LogAffinity(logits)


def sinkhorn(
    logits: Tensor,
    log_weight: Tensor | None = None,
    *,
    steps: int = SINKHORN_STEPS,
    tolerance: float = SINKHORN_TOLERANCE,
) -> LogAffinity:
    """Sinkhorn normalization, A = exp(log k − f_i − g_j) with row sums 1 and column sums N / T.

    The two softmaxes alternate in log space, at most ``steps`` times. Each problem stops as soon as its
    column sums agree to the relative ``tolerance``, so that a result does not depend on the other
    problems of the batch.
    """
    log_column_sum: float | Tensor = math.log(logits.shape[-2] / logits.shape[-1])
    if log_weight is not None:
        log_column_sum = math.log(logits.shape[-2]) - log_weight.logsumexp(dim=-1, keepdim=True)
    g = torch.zeros_like(logits[..., :1, :])
    converged = torch.zeros_like(logits[..., :1, :1], dtype=torch.bool)
    for _ in range(steps):
        f = _log_sum(logits - g, -1, log_weight)
        updated = _log_sum(logits - f, -2) - log_column_sum
        converged |= (updated - g).abs().amax(-1, keepdim=True) < tolerance
        g = torch.where(converged, g, updated)
        if converged.all():
            break
    scaled = logits - g
    return LogAffinity(scaled - _log_sum(scaled, -1, log_weight))


NORMALIZATIONS: dict[str, Normalization] = {"both": both, "y": over_y, "none": none, "sinkhorn": sinkhorn}


def get_normalization(normalization: str | Normalization) -> Normalization:
    """Return the normalization of that name. A function is returned unchanged (it may return a tensor A)."""
    if isinstance(normalization, str) and normalization in NORMALIZATIONS:
        return NORMALIZATIONS[normalization]
    if not callable(normalization):
        raise unknown_name("normalization", normalization, NORMALIZATIONS)
    return normalization


def _log_softmax_y(logits: Tensor, log_weight: Tensor | None) -> Tensor:
    """log(k / Σ_y w·k) of each x."""
    if log_weight is None:
        return logits.log_softmax(dim=-1)
    log_sum = torch.logsumexp(logits + log_weight, dim=-1, keepdim=True)
    return torch.where(log_sum > MIN_LOG_SUM, logits - log_sum, MASKED)  # without weights, A is 0


def _log_sum(logits: Tensor, dim: int, log_weight: Tensor | None = None) -> Tensor:
    if log_weight is not None:
        logits = logits + log_weight
    # The clamp keeps a column of masked pairs masked: MASKED minus the log-sum stays far below any logit.
    return torch.logsumexp(logits, dim=dim, keepdim=True).clamp_(min=MIN_LOG_SUM)
