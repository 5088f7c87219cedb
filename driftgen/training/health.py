"""Whether a run is healthy, told by the figures of its steps, since the loss is flat by design."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, TypeGuard

from torch import Tensor, nn

from driftgen.training.step_metrics import feature_group, measure

__all__ = ["Health", "feature_group", "measure", "never_trained"]

WINDOW = 10  # rows that a verdict looks at, so that no single step decides
KEPT = 6 * WINDOW  # rows remembered
CLEARED = 2 * WINDOW  # rows without a finding after which it may be told again
# Measured on digits, CIFAR-10 and the 2-D toys; the healthy and the broken side of each, in this order.
LEAST_DIVERSITY = 0.35  # 0.8 ... 3.9 | attraction only: falls to 0.25 (300 steps), 0.04 (toy)
MOST_SPREAD = 3.0  # falls from 3 to 1.2 | 2 V⁻: 5 at 50 steps, 54 at 300
LEAST_NEIGHBOURS = 1.1  # at τ = 0.02: 1.5 ... 100 | at 1e-4: 1.00 ... 1.06
LEAST_VARIATION = 1e-3  # 0.03 ... 1 | a constant encoder: below 1e-6
LEAST_CLASS_SHARE = 0.4  # of that of the samples: digits 0.49 ... 0.61 | random weights: 0.06 ... 0.43
JUMP = 100.0  # growth within a window that no healthy run shows


class Health:
    """Reads rows of ``metrics.jsonl`` and says in plain words what is wrong.

    Example::

        health = Health(loss.temperatures)
        for text in health.update(row):     # new warnings; each kind once, until it has cleared for a while
            view.warn(text)

    Args:
        temperatures: those of the loss, to name one that is too low.
        untrained: encoders known to be untrained, see :func:`never_trained`.

    Attributes:
        state: the warnings that hold now.
    """

    def __init__(self, temperatures: Sequence[float] = (), untrained: Sequence[str] = ()) -> None:
        self.temperatures, self.untrained = tuple(temperatures), tuple(untrained)
        self.state: list[str] = []
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=KEPT)
        self._seen = 0
        self._highest: dict[str, float] = {}
        self._active: dict[str, tuple[str, int]] = {}  # kind -> text, row it was last found in

    def update(self, row: Mapping[str, Any]) -> list[str]:
        """Takes one more row; returns the warnings that are new."""
        self._rows.append(row)
        self._seen += 1
        fresh = []
        for kind, text in self._findings():
            if kind not in self._active:
                fresh.append(text)
            self._active[kind] = (text, self._seen)
        self._active = {k: v for k, v in self._active.items() if self._seen - v[1] <= CLEARED}
        self.state = [text for text, _ in self._active.values()]
        return fresh

    def _findings(self) -> Iterator[tuple[str, str]]:
        yield from self._divergence()
        yield from self._collapse()
        yield from self._temperature()
        yield from self._encoder()
        yield from self._stall()

    def _divergence(self) -> Iterator[tuple[str, str]]:
        row = self._rows[-1]
        broken = [k for k in ("loss", "gradient_norm", "drift") if k in row and not _finite(row[k])]
        if broken:
            yield (
                "not finite",
                f"diverging: {' and '.join(broken).replace('_', ' ')} is not a finite number; "
                "lower optim.lr, or use precision: float32",
            )
        before = self._rows[-2].get("skipped", 0) if len(self._rows) > 1 else 0
        if row.get("skipped", 0) > before:
            yield (
                "skipped",
                "diverging: steps are skipped because their gradient is not finite or explodes; "
                "lower optim.lr or lengthen optim.warmup",
            )
        spread, earlier = self._middle("spread"), self._middle("spread", ago=WINDOW)
        if spread > MOST_SPREAD and spread > 1.3 * earlier:
            yield (
                "spread",
                f"diverging: generated samples fly apart, {spread:.1f} times as spread out as the data and "
                "growing; loss.repulsion must not be above loss.attraction, else lower optim.lr",
            )
        for key, word in (("gradient_norm", "the gradient norm"), ("drift", "the raw drift")):
            now, past = self._middle(key), self._middle(key, ago=len(self._rows) - WINDOW)
            if len(self._rows) >= 2 * WINDOW and now > JUMP * past > 0:
                yield (
                    f"jump {key}",
                    f"diverging: {word} grew from {past:.2g} to {now:.2g}; lower optim.lr or optim.clip",
                )

    def _collapse(self) -> Iterator[tuple[str, str]]:
        for key, word in (
            ("diversity", "the samples of a class are nearly alike"),
            ("spread", "all samples are nearly alike"),
        ):
            now = self._middle(key)
            if not math.isfinite(now) or self._seen < WINDOW:
                continue
            highest = self._highest[key] = max(now, self._highest.get(key, 0.0))
            # A generator may start as a point; then it is no collapse while it still opens.
            opening = now > 1.1 * self._middle(key, ago=WINDOW) or self._warming() or self._seen < 3 * WINDOW
            if now < LEAST_DIVERSITY and (highest > 2 * now or not opening):
                yield (
                    "collapse",
                    f"collapsed: {word} ({key} {now:.2g}, the data has 1); loss.repulsion must equal "
                    "loss.attraction, else lower optim.lr, raise batch.generated or lower guidance.high",
                )
                return

    def _temperature(self) -> Iterator[tuple[str, str]]:
        recent = [r["neighbours"] for r in list(self._rows)[-WINDOW:] if r.get("neighbours")]
        if len(recent) < WINDOW:
            return
        counts = [median(column) for column in zip(*recent, strict=True)]
        taus = self.temperatures if len(self.temperatures) == len(counts) else range(len(counts))
        low = [(t, n) for t, n in zip(taus, counts, strict=True) if n < LEAST_NEIGHBOURS]
        if low:
            which = ", ".join(f"{t:g}" for t, _ in low)
            yield (
                "temperature",
                f"temperature too low: at {which} a sample feels only its nearest neighbour "
                f"({min(n for _, n in low):.2f} neighbours), which tells it nothing of where the data lies; "
                "raise loss.temperatures (the paper has 0.02, 0.05, 0.2) or batch.positives",
            )

    def _encoder(self) -> Iterator[tuple[str, str]]:
        variation = self._middle("encoder_spread")
        if self._seen >= 3 and variation < LEAST_VARIATION:
            yield (
                "encoder",
                f"dead encoder: its features hardly differ between images (variation {variation:.1g}); "
                "check the file under encoders, and pretrain it longer",
            )
            return
        names = self._rows[-1].get("dead")
        if self._seen >= 3 and names:
            some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            yield (
                "dead features",
                f"dead features: {some} are the same for every image, so their drift is rounding noise; a "
                "normalisation group of one channel does that: widen the encoder, or set mean_std: false "
                "in its switches",
            )
        if self._seen >= 3 and self.untrained:
            yield (
                "random encoder",
                f"untrained encoder: all normalisation weights of {', '.join(self.untrained)} are as they "
                "start, so it holds random weights; pretrain it, and check the file under encoders",
            )
            return
        shares = [r["class_share"] for r in self._rows if r.get("class_share")]
        if len(shares) >= WINDOW:
            encoder, sample = (sum(column) / len(shares) for column in zip(*shares, strict=True))
            if sample > 0.03 and encoder < LEAST_CLASS_SHARE * sample:
                yield (
                    "random encoder",
                    f"untrained encoder: its features tell classes apart far worse than pixels do ("
                    f"{max(encoder, 0):.1%} of their variance lies between classes, {sample:.1%} of that of "
                    "pixels), as random weights do; check the file under encoders, and pretrain it longer",
                )

    def _stall(self) -> Iterator[tuple[str, str]]:
        if len(self._rows) < KEPT or self._warming() or {"collapse", "spread"} & set(self._active):
            return
        now, past = self._middle("diversity"), self._middle("diversity", ago=KEPT - WINDOW)
        if math.isfinite(past) and not 0.5 < now < 2 and abs(math.log(now / past)) < 0.05:
            yield (
                "stall",
                f"stalled far from equilibrium: within-class diversity stays at {now:.2g} of that of the "
                "data; raise optim.lr, the temperatures or the size of the generator",
            )

    def _warming(self) -> bool:
        rates = [r["learning_rate"] for r in list(self._rows)[-WINDOW:] if "learning_rate" in r]
        return len(rates) > 1 and rates[-1] > rates[0]

    def _middle(self, key: str, ago: int = 0) -> float:
        """The median over a window of rows that ends ``ago`` rows before the last; NaN where there is none.

        A list counts with its largest entry.
        """
        rows = list(self._rows)[: len(self._rows) - ago][-WINDOW:]
        values = (r.get(key) for r in rows)
        numbers = [float(max(v) if isinstance(v, list) else v) for v in values if _finite(v)]
        return median(numbers) if numbers else math.nan


def never_trained(encoder: nn.Module) -> bool:
    """Whether every normalisation layer still has the weights 1 and biases 0 that it starts with, which no
    step of training leaves alone.
    """
    layers = [m for m in encoder.modules() if "Norm" in type(m).__name__]
    starts: list[tuple[Any, float]] = [
        (m.weight, 1.0) for m in layers if isinstance(getattr(m, "weight", None), Tensor)
    ]
    starts += [(m.bias, 0.0) for m in layers if isinstance(getattr(m, "bias", None), Tensor)]
    return bool(starts) and all(bool((value == start).all()) for value, start in starts)


def _finite(value: Any) -> TypeGuard[float | list[float]]:
    if isinstance(value, list):
        return bool(value) and all(_finite(v) for v in value)
    return isinstance(value, int | float) and math.isfinite(value)
