"""Mean and spread over seeds, and the comparison of two cases."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Spread", "Verdict", "judge", "spread"]

Verdict = Literal["holds", "unclear", "reversed", "not run"]
CLEAR = 2.0  # standard errors between two means


@dataclass(frozen=True)
class Spread:
    """Figures of one case over its seeds.

    Attributes:
        count: seeds with a figure.
        mean: their mean; infinite if a run diverged.
        deviation: sample standard deviation, with n − 1; None for fewer than two seeds.
    """

    count: int
    mean: float
    deviation: float | None

    @property
    def error(self) -> float | None:
        """Standard error of the mean, s / √n."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)


def spread(values: Sequence[float]) -> Spread | None:
    """Return the statistics of the figures of one case; None without figures.

    A run that diverged counts as infinite: so does the mean, and the deviation is unknown.
    """
    if not values:
        return None
    if not all(math.isfinite(value) for value in values):
        return Spread(len(values), math.inf, None)
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(len(values), statistics.fmean(values), deviation)


def judge(better: Spread | None, worse: Spread | None) -> Verdict:
    """Compare two cases by a metric where lower is better.

    The claim "``better`` has the lower mean" holds, or is reversed, if the means differ by more than twice
    the standard error of their difference, √(s₁²/n₁ + s₂²/n₂). Otherwise, and with a single seed, the result
    is unclear. A case that diverged is worse than any that did not.
    """
    if better is None or worse is None:
        return "not run"
    diverged = math.isinf(better.mean), math.isinf(worse.mean)
    if any(diverged):
        return "unclear" if all(diverged) else "holds" if diverged[1] else "reversed"
    if better.error is None or worse.error is None:
        return "unclear"
    difference = worse.mean - better.mean
    threshold = CLEAR * math.hypot(better.error, worse.error)
    if abs(difference) <= threshold:
        return "unclear"
    return "holds" if difference > 0 else "reversed"
