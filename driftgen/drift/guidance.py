"""Guidance strength α: its distribution, and the weight of unconditional negatives (appendix
"Classifier-Free Guidance")."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.checked_arguments import checked
from driftgen.support.whole_numbers import check_count

__all__ = ["alpha_at", "sample_alpha", "unconditional_weight"]

MOST = 1e6  # bound of α


@checked
def sample_alpha(
    n: int,
    low: float = 1.0,
    high: float = 4.0,
    power: float = 3.0,
    no_guidance: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw α ``[n]``: 1 with probability ``no_guidance``, else from p(α) ∝ α^-power on [low, high]."""
    check_count("n", n, 0)
    device = generator.device if generator is not None else None
    uniform, chance = torch.rand(2, n, generator=generator, device=device)
    return alpha_at(uniform, chance, low, high, power, no_guidance)


@checked
def alpha_at(
    uniform: Tensor,
    chance: Tensor,
    low: float = 1.0,
    high: float = 4.0,
    power: float = 3.0,
    no_guidance: float = 0.0,
) -> Tensor:
    """Return the α whose distribution function is ``uniform``, or 1 where ``chance`` < ``no_guidance``.

    With e = 1 − power: α = (low^e + u (high^e − low^e))^(1/e), and low (high / low)^u for e = 0. Powers are
    taken relative to the largest: low^e alone underflows or overflows for large exponents.
    """
    if not 1 <= low <= high <= MOST:
        raise InputError(f"low={low} and high={high} must satisfy 1 <= low <= high <= {MOST:g}")
    if not math.isfinite(power):
        raise InputError(f"power={power} must be a finite number")
    if not 0 <= no_guidance <= 1:
        raise InputError(f"no_guidance={no_guidance} must be between 0 and 1")
    _check_range("uniform", uniform, 1)
    if uniform.shape != chance.shape:
        raise InputError(f"uniform and chance have shapes {list(uniform.shape)} and {list(chance.shape)}")
    exponent = 1.0 - power
    steps = exponent * math.log(high / low)  # log of high^e / low^e
    if abs(exponent) < 1e-6:
        alpha = low * (high / low) ** uniform
    elif steps <= 0:
        alpha = low * (1 + uniform * math.expm1(steps)) ** (1 / exponent)
    else:
        alpha = high * (uniform + (1 - uniform) * math.exp(-steps)) ** (1 / exponent)
    return torch.where(chance < no_guidance, torch.ones_like(alpha), alpha.clamp(low, high))


@checked
def unconditional_weight(alpha: Tensor, generated: int, unconditional: int) -> Tensor:
    """Return the weight of each unconditional negative, w = (α − 1) (N_neg − 1) / N_unc.

    It solves α = ((N_neg − 1) + N_unc w) / (N_neg − 1).
    """
    if generated < 1 or unconditional < 0:
        raise InputError(f"generated={generated} and unconditional={unconditional} must be at least 1 and 0")
    _check_range("alpha", alpha, MOST)
    alpha = alpha.to(torch.promote_types(alpha.dtype, torch.float32))  # the weight may overflow 16 bits
    return (alpha - 1) * (generated - 1) / max(1, unconditional)


def _check_range(argument: str, values: Tensor, most: float) -> None:
    if not values.is_floating_point():
        raise InputError(f"{argument} must hold floating-point numbers, got {values.dtype}")
    # Reading the values would synchronize a GPU. There, a NaN shows in the loss.
    if values.device.type == "cpu" and not ((values >= 0) & (values <= most)).all():
        raise InputError(f"{argument} must hold numbers from 0 to {most:g}")
