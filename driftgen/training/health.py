"""Warnings about unhealthy runs, derived from the metrics of their steps: the loss is flat by design."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

from driftgen.errors import explained
from driftgen.training.step_metrics import feature_group, measure

__all__ = ["Health", "feature_group", "measure", "never_trained"]

WINDOW = 10  # rows that a check takes the median of, so that no single step decides
HISTORY = 6 * WINDOW  # rows held
CLEARED = 2 * WINDOW  # rows without a problem after which its warning may be repeated
# Measured on digits, CIFAR-10 and the 2-D toys: "healthy range | broken range".
MIN_DIVERSITY = 0.35  # 0.8 ... 3.9 | attraction only: falls to 0.25 (300 steps), 0.04 (toy)
MAX_SPREAD = 3.0  # falls from 3 to 1.2 | 2 V⁻: 5 at 50 steps, 54 at 300
MIN_NEIGHBORS = 1.1  # at τ = 0.02: 1.5 ... 100 | at 1e-4: 1.00 ... 1.06
MIN_VARIATION = 1e-3  # 0.03 ... 1 | a constant encoder: below 1e-6
MIN_CLASS_SHARE = 0.4  # relative to the samples: digits 0.49 ... 0.61 | random weights: 0.06 ... 0.43
JUMP = 100.0  # growth within a window that no healthy run shows


class Problem(NamedTuple):
    """A problem of a run.

    Attributes:
        kind: problems of one kind are told once, until they have cleared.
        topic: section of the troubleshooting page, see ``driftgen explain``.
        text: what is wrong, the value, what to change.
    """

    kind: str
    topic: str
    text: str


class Health:
    """Checks rows of ``metrics.jsonl`` and describes problems in one line each.

    Example::

        health = Health(loss.temperatures)
        for text in health.update(row):     # new warnings; each kind once, until it has cleared
            view.warn(text)

    Args:
        temperatures: of the loss, to name one that is too low.
        untrained: paths of untrained encoders, see :func:`never_trained`.
        trained_start: the run starts from trained weights (``init``), which an average may well hold.
        ema_warmup: the averages warm up already, so that is no advice.

    Attributes:
        state: the current warnings.
    """

    def __init__(
        self,
        temperatures: Sequence[float] = (),
        untrained: Sequence[str] = (),
        trained_start: bool = False,
        ema_warmup: bool = False,
    ) -> None:
        self.temperatures, self.untrained = tuple(temperatures), tuple(untrained)
        self.trained_start, self.ema_warmup = trained_start, ema_warmup
        self.state: list[str] = []
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)
        self._seen = 0
        self._highest: dict[str, float] = {}
        self._active: dict[str, tuple[str, int]] = {}  # kind -> text, last row that had the problem

    def update(self, row: Mapping[str, Any]) -> list[str]:
        """Check one more row and return the new warnings."""
        self._rows.append(row)
        self._seen += 1
        new = []
        for kind, topic, message in self._problems():
            text = explained(message, topic)
            if kind not in self._active:
                new.append(text)
            self._active[kind] = (text, self._seen)
        self._active = {k: v for k, v in self._active.items() if self._seen - v[1] <= CLEARED}
        self.state = [text for text, _ in self._active.values()]
        return new

    def _problems(self) -> Iterator[Problem]:
        yield from self._divergence()
        yield from self._collapse()
        yield from self._temperature()
        yield from self._encoder()
        yield from self._stall()
        yield from self._initial_weights()
        yield from self._unreadable()

    def _divergence(self) -> Iterator[Problem]:
        row = self._rows[-1]
        broken = [k for k in ("loss", "gradient_norm", "drift") if k in row and not _finite(row[k])]
        if broken:
            yield Problem(
                "not finite",
                "not-finite",
                f"diverging: {' and '.join(broken).replace('_', ' ')} is not finite; "
                "lower optim.lr or set precision=float32",
            )
        before = self._rows[-2].get("skipped", 0) if len(self._rows) > 1 else 0
        if row.get("skipped", 0) > before:
            yield Problem(
                "skipped",
                "skipped-steps",
                "diverging: steps are skipped because their gradient is not finite or explodes; "
                "lower optim.lr or raise optim.warmup",
            )
        spread, earlier = self._median("spread"), self._median("spread", ago=WINDOW)
        if spread > MAX_SPREAD and spread > 1.3 * earlier:
            yield Problem(
                "spread",
                "divergence",
                f"diverging: the spread of generated samples is {spread:.1f} times that of the data and "
                "growing; check that loss.repulsion is not above loss.attraction, or lower optim.lr",
            )
        for key, word in (("gradient_norm", "the gradient norm"), ("drift", "the raw drift")):
            now, past = self._median(key), self._median(key, ago=len(self._rows) - WINDOW)
            if len(self._rows) >= 2 * WINDOW and now > JUMP * past > 0:
                yield Problem(
                    f"jump {key}",
                    "divergence",
                    f"diverging: {word} grew from {past:.2g} to {now:.2g}; lower optim.lr or optim.clip",
                )

    def _collapse(self) -> Iterator[Problem]:
        for key, word in (
            ("diversity", "the samples of a class are nearly identical"),
            ("spread", "all samples are nearly identical"),
        ):
            now = self._median(key)
            if not math.isfinite(now) or self._seen < WINDOW:
                continue
            highest = self._highest[key] = max(now, self._highest.get(key, 0.0))
            # A generator may start as a point; it has not collapsed while its spread still grows.
            growing = now > 1.1 * self._median(key, ago=WINDOW) or self._warming() or self._seen < 3 * WINDOW
            if now < MIN_DIVERSITY and (highest > 2 * now or not growing):
                yield Problem(
                    "collapse",
                    "collapse",
                    f"collapsed: {word} ({key} {now:.2g}, the data has 1); check that loss.repulsion equals "
                    "loss.attraction, or lower optim.lr, raise batch.generated, lower guidance.high",
                )
                return

    def _temperature(self) -> Iterator[Problem]:
        recent = [r["neighbors"] for r in list(self._rows)[-WINDOW:] if r.get("neighbors")]
        if len(recent) < WINDOW:
            return
        counts = [median(column) for column in zip(*recent, strict=True)]
        taus = self.temperatures if len(self.temperatures) == len(counts) else range(len(counts))
        low = [(t, n) for t, n in zip(taus, counts, strict=True) if n < MIN_NEIGHBORS]
        if low:
            listed = ", ".join(f"{t:g}" for t, _ in low)
            yield Problem(
                "temperature",
                "low-temperature",
                f"temperature too low: at {listed} only the nearest neighbor acts on a sample (effective "
                f"number of neighbors {min(n for _, n in low):.2f}), so the drift says little of the data; "
                "raise loss.temperatures (the paper has 0.02, 0.05, 0.2) or batch.positives",
            )

    def _encoder(self) -> Iterator[Problem]:
        variation = self._median("encoder_spread")
        if self._seen >= 3 and variation < MIN_VARIATION:
            yield Problem(
                "encoder",
                "dead-encoder",
                f"dead encoder: its features hardly differ between samples (variation {variation:.1g}); "
                "check the path under encoders, or pretrain the encoder longer",
            )
            return
        names = self._rows[-1].get("dead")
        if self._seen >= 3 and names:
            some = ", ".join(names[:3]) + (" ..." if len(names) > 3 else "")
            yield Problem(
                "dead features",
                "dead-features",
                f"dead features: {some} are equal for every sample, so their drift is rounding noise; a "
                "normalization group of one channel causes this: widen the encoder, or set mean_std: false "
                "in its switches",
            )
        if self._seen >= 3 and self.untrained:
            yield Problem(
                "random encoder",
                "untrained-encoder",
                f"untrained encoder: all normalization weights of {', '.join(self.untrained)} have their "
                "initial values, so the encoder is random; pretrain it, or check the path under encoders",
            )
            return
        shares = [r["class_share"] for r in self._rows if r.get("class_share")]
        if len(shares) >= WINDOW:
            encoder, sample = (sum(column) / len(shares) for column in zip(*shares, strict=True))
            if sample > 0.03 and encoder < MIN_CLASS_SHARE * sample:
                yield Problem(
                    "random encoder",
                    "untrained-encoder",
                    f"untrained encoder: only {max(encoder, 0):.1%} of the variance of its features lies "
                    f"between classes ({sample:.1%} for the samples themselves), as with random weights; "
                    "check the path under encoders, or pretrain the encoder longer",
                )

    def _stall(self) -> Iterator[Problem]:
        if len(self._rows) < HISTORY or self._warming() or {"collapse", "spread"} & set(self._active):
            return
        now, past = self._median("diversity"), self._median("diversity", ago=HISTORY - WINDOW)
        if math.isfinite(past) and not 0.5 < now < 2 and abs(math.log(now / past)) < 0.05:
            yield Problem(
                "stall",
                "stall",
                f"stalled far from equilibrium: within-class diversity stays at {now:.2g} times that of the "
                "data; raise optim.lr, loss.temperatures or the size of the generator",
            )

    def _initial_weights(self) -> Iterator[Problem]:
        if self.trained_start:
            return
        advice = "train for longer, or lower ema"
        if not self.ema_warmup:
            advice = "train for longer, lower ema, or start a new run with ema_warmup=true"
        for decay, (share, step) in (self._rows[-1].get("ema_initial_share") or {}).items():
            yield Problem(
                f"initial weights {decay}",
                "initial-weights",
                f"initial weights in the average: the saved EMA {decay} still holds {share:.0%} of the "
                f"initial weights, and 5% at step {step:,}; {advice}",
            )

    def _unreadable(self) -> Iterator[Problem]:
        found = self._rows[-1].get("unreadable")
        if found:
            # A kind of its own for each power of 2: images are found one by one, and not each is a warning.
            yield Problem(
                f"unreadable {int(found['count']).bit_length()}",
                "unreadable-images",
                f"unreadable images: {found['count']:,} left out or replaced by others of their class, such "
                f"as {found['names'][0]}; repair or remove them",
            )

    def _warming(self) -> bool:
        rates = [r["learning_rate"] for r in list(self._rows)[-WINDOW:] if "learning_rate" in r]
        return len(rates) > 1 and rates[-1] > rates[0]

    def _median(self, key: str, ago: int = 0) -> float:
        """Return the median over a window of rows that ends ``ago`` rows before the last; NaN for no rows.

        A list counts as its largest entry. Trained weights (``batch_*``) show a problem first.
        """
        rows = list(self._rows)[: len(self._rows) - ago][-WINDOW:]
        values = (r.get(f"batch_{key}", r.get(key)) for r in rows)
        finite = [float(max(v) if isinstance(v, list) else v) for v in values if _finite(v)]
        return median(finite) if finite else math.nan


def never_trained(encoder: nn.Module) -> bool:
    """Return True if every normalization layer has its initial weights 1 and biases 0.

    Any training step would have changed them.
    """
    layers = [m for m in encoder.modules() if "Norm" in type(m).__name__]
    initial: list[tuple[Any, float]] = [
        (m.weight, 1.0) for m in layers if isinstance(getattr(m, "weight", None), Tensor)
    ]
    initial += [(m.bias, 0.0) for m in layers if isinstance(getattr(m, "bias", None), Tensor)]
    return bool(initial) and all(bool((value == start).all()) for value, start in initial)


def _finite(value: Any) -> TypeGuard[float | list[float]]:
    if isinstance(value, list):
        return bool(value) and all(_finite(v) for v in value)
    return isinstance(value, int | float) and math.isfinite(value)
