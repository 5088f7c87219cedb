"""The paper's 2-D studies: q drifts toward p, as the output of a generator or as free points."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from driftgen.data.toy import Toy
from driftgen.drift.arguments import check_temperature
from driftgen.drift.field import drift_field
from driftgen.drift.kernels import get_kernel
from driftgen.drift.loss import DriftingLoss
from driftgen.drift.normalization import get_normalization
from driftgen.errors import InputError, unknown_name
from driftgen.evaluation.points import energy_distance, mode_shares
from driftgen.generators import MLP

__all__ = [
    "ANTISYMMETRY",
    "EVALUATED",
    "INITS",
    "Evolution",
    "ToyConfig",
    "antisymmetry_study",
    "evolve",
    "show_energy_distance",
]

INITS = ("between", "far", "collapsed")
OnStep = Callable[[int, float], None]
EVALUATED = 4096  # samples that quality and drift are measured with
SHOWN = 1000  # samples of a generator in a figure


@dataclass(frozen=True)
class ToyConfig:
    """One toy run. None stands for the default of the distribution or of the kind of run."""

    init: str = "between"
    generator: bool = False  # an MLP trained with the plain loss; else points that move by x += V
    steps: int | None = None  # 150 for points, 800 for a generator
    samples: int | None = None  # per step: 512 points, or 256 from a generator
    positives: int = 512
    temperature: float | None = None
    kernel: str = "laplace"
    normalization: str = "both"
    attraction: float = 1.0
    repulsion: float = 1.0
    learning_rate: float = 4e-3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.init not in INITS:
            raise unknown_name("init", self.init, INITS)
        bounds = {
            "steps": (1, 10**7),
            "samples": (2, 20_000),
            "positives": (1, 20_000),
            "seed": (0, 2**63 - 1),
        }
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and least <= value <= most):
                raise InputError(f"{name}={value} must be a whole number from {least} to {most}")
        if self.temperature is not None:
            check_temperature("temperature", self.temperature)
        get_kernel(self.kernel)
        get_normalization(self.normalization)
        for name in ("attraction", "repulsion"):
            if not 0 <= getattr(self, name) <= 100:
                raise InputError(f"{name}={getattr(self, name)} must be a number from 0 to 100")
        if not 0 < self.learning_rate <= 1:
            raise InputError(f"learning_rate={self.learning_rate} must be a positive number, at most 1")

    def resolve(self, toy: Toy) -> ToyConfig:
        """Return a copy with every default resolved."""
        return replace(
            self,
            steps=self.total_steps,
            samples=self.samples or (256 if self.generator else 512),
            temperature=self.temperature or toy.temperature,
        )

    @property
    def total_steps(self) -> int:
        """Number of steps, resolved."""
        return self.steps or (800 if self.generator else 150)


@dataclass
class Evolution:
    """Result of a run: samples at several steps, the drift at every step, metrics of the last samples."""

    config: ToyConfig
    data: Tensor
    frames: dict[int, Tensor]
    drift: list[float]
    metrics: dict[str, Any] = field(default_factory=dict)


def evolve(
    toy: Toy, config: ToyConfig, on_step: OnStep = lambda step, drift: None, frames: int = 48
) -> Evolution:
    """Let q drift toward p for ``config.total_steps`` steps.

    Points follow x ← x + V(x). A generator minimizes the plain loss ‖f(ε) − sg(f(ε) + V)‖² (Algorithm 1); its
    value is the mean squared drift, which ``drift`` records.
    """
    start = time.perf_counter()
    rng = torch.Generator().manual_seed(config.seed)
    data = toy.sample(EVALUATED, rng)
    config = config.resolve(toy)
    run = (_Generator if config.generator else _Points)(toy, config, rng, data)
    frame_steps = _log_spaced(config.total_steps, frames)
    evolution = Evolution(config, data, {}, [])
    initial = run.evaluate()
    for step in range(config.total_steps + 1):
        if step in frame_steps:
            evolution.frames[step] = run.visible_samples()
        if step < config.total_steps:
            evolution.drift.append(run.step())
            on_step(step + 1, evolution.drift[-1])
    evolution.metrics = _metrics(toy, rng, initial, run.evaluate(), config)
    evolution.metrics |= {
        "drift_of_first_step": evolution.drift[0],
        "drift_of_last_step": evolution.drift[-1],
    }
    evolution.metrics["seconds"] = round(time.perf_counter() - start, 2)
    return evolution


class _Points:
    """q as a set of points that the field moves."""

    def __init__(self, toy: Toy, config: ToyConfig, rng: torch.Generator, data: Tensor) -> None:
        self.toy, self.config, self.rng = toy, config, rng
        assert config.samples is not None
        assert config.temperature is not None
        self.samples, self.temperature = config.samples, config.temperature
        self.options: dict[str, Any] = {
            "kernel": config.kernel,
            "normalization": config.normalization,
            "attraction": config.attraction,
            "repulsion": config.repulsion,
        }
        self.prepare(*_start(toy, config.init, data))

    def prepare(self, center: Tensor, spread: float) -> None:
        self.x = center + spread * torch.randn(self.samples, 2, generator=self.rng)

    def visible_samples(self) -> Tensor:
        return self.x.clone()

    def step(self) -> float:
        v = self.drift(self.x, self.toy.sample(self.config.positives, self.rng))
        self.x = self.x + v
        return float(v.square().mean())

    def evaluate(self) -> tuple[Tensor, float]:
        """Return samples of q and their mean squared drift with respect to many data points."""
        v = self.drift(self.x, self.toy.sample(2 * EVALUATED, self.rng))
        return self.x, float(v.square().mean())

    def drift(self, x: Tensor, positives: Tensor, negatives: Tensor | None = None) -> Tensor:
        return drift_field(x, positives, negatives, temperature=self.temperature, **self.options)


class _Generator(_Points):
    """q as the output distribution of an MLP."""

    def prepare(self, center: Tensor, spread: float) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.config.seed)
            self.net = MLP(noise_dim=32, data_dim=2, hidden=128, depth=3)
            self.net.place(center, spread)
        self.noise = self.net.sample_noise(SHOWN, self.rng)
        self.loss = DriftingLoss(
            self.temperature, normalize_features=False, normalize_drift=False, **self.options
        )
        steps = self.config.total_steps
        self.optimizer = torch.optim.Adam(
            self.net.parameters(), lr=self.config.learning_rate, betas=(0.9, 0.95), fused=True
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def visible_samples(self) -> Tensor:
        with torch.no_grad():
            x: Tensor = self.net(self.noise)
        return x

    def step(self) -> float:
        x = self.net(self.net.sample_noise(self.samples, self.rng))
        out = self.loss(x, self.toy.sample(self.config.positives, self.rng))
        self.optimizer.zero_grad()
        out.loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return float(out.loss.detach())

    def evaluate(self) -> tuple[Tensor, float]:
        with torch.no_grad():
            x = self.net(self.net.sample_noise(EVALUATED, self.rng))
            # Few x against many negatives: with few negatives, V is mostly sampling noise.
            negatives = self.net(self.net.sample_noise(2 * EVALUATED, self.rng))
        v = self.drift(x[: EVALUATED // 4], self.toy.sample(2 * EVALUATED, self.rng), negatives)
        return x, float(v.square().mean())


def _start(toy: Toy, init: str, data: Tensor) -> tuple[Tensor, float]:
    """Return the initial center and spread of q."""
    center, size = data.mean(dim=0), float(data.std(dim=0).norm())
    if init == "between":
        return center, 0.15 * size
    if init == "far":
        return center + torch.tensor([0.0, 3.0]) * size, 0.15 * size
    mode = toy.modes[0] if toy.modes is not None else data[data[:, 0].argmin()]
    return mode, 0.08 * size


def _metrics(
    toy: Toy,
    rng: torch.Generator,
    first: tuple[Tensor, float],
    last: tuple[Tensor, float],
    config: ToyConfig,
) -> dict[str, Any]:
    x, drift = last
    fresh, again = toy.fresh(EVALUATED, rng), toy.fresh(EVALUATED, rng)
    metrics: dict[str, Any] = {
        "distribution": toy.name,
        "config": asdict(config),
        "evaluator": f"unbiased energy distance to {EVALUATED} fresh points, below 0 for no difference; "
        f"drift at start and end by {2 * EVALUATED} fresh points, of a step by config.positives points; "
        "normalized over both axes, the drift grows with the number of points per sample, so compare drifts "
        "of one kind only",
        "energy_distance": energy_distance(x, fresh),
        "energy_distance_at_start": energy_distance(first[0], fresh),
        "energy_distance_of_data_to_itself": energy_distance(again, fresh),
        "spread": float(x.std(dim=0).norm() / fresh.std(dim=0).norm()),
        "drift_at_start": first[1],
        "drift_at_end": drift,
        "drift_ratio": first[1] / max(drift, 1e-30),
    }
    if toy.modes is not None:
        metrics["mode_shares"] = mode_shares(x, toy.modes)
        metrics["least_mode_share"] = min(metrics["mode_shares"])
    return metrics


def show_energy_distance(value: float) -> str:
    """Format an unbiased estimate: one below 0 is shown as 0, beside the estimate."""
    return f"{value:.4f}" if value >= 0 else f"0.0000 (unbiased estimate {value:.4f})"


def _log_spaced(steps: int, count: int) -> set[int]:
    """Return 0, the last step, and about ``count`` steps between, denser at the beginning."""
    power = torch.linspace(0, 1, count, dtype=torch.float64) * math.log1p(steps)
    return {0, steps, *(round(p) for p in torch.expm1(power).tolist())}


ANTISYMMETRY: dict[str, tuple[float, float]] = {
    "anti-symmetry (default)": (1.0, 1.0),
    "1.5x attraction": (1.5, 1.0),
    "1.5x repulsion": (1.0, 1.5),
    "2.0x attraction": (2.0, 1.0),
    "2.0x repulsion": (1.0, 2.0),
    "attraction only": (1.0, 0.0),
}
"""Factors of V⁺ and V⁻ in the rows of the paper's table on anti-symmetry."""


def antisymmetry_study(
    toy: Toy, config: ToyConfig, on_step: OnStep = lambda step, drift: None
) -> dict[str, Evolution]:
    """Run the paper's destructive study on a toy: one run for each pair of factors.

    ``on_step`` counts steps over all runs.
    """
    runs = {}
    for i, (name, (attraction, repulsion)) in enumerate(ANTISYMMETRY.items()):
        changed = replace(config, attraction=attraction, repulsion=repulsion)
        done = i * config.total_steps
        runs[name] = evolve(toy, changed, lambda step, drift, done=done: on_step(done + step, drift))  # type: ignore[misc]
    return runs
