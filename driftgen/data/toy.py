"""Two-dimensional toy distributions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from driftgen.drift.field import pairwise_distance
from driftgen.errors import InputError, unknown_name
from driftgen.support.checked_arguments import checked
from driftgen.support.untrusted_files import read_array

__all__ = ["DISTRIBUTIONS", "Toy", "from_points", "get_toy", "load_points"]


class Sampler(Protocol):
    """Draws n points ``[n, 2]``."""

    def __call__(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Toy:
    """A distribution of points in the plane: ``sample(n, generator)`` draws ``[n, 2]``.

    ``temperature`` is a suitable kernel width: below the size of the details, above the gaps that a drift
    must cross. ``modes`` are the centers of equally likely modes, if any. ``holdout`` draws points that
    ``sample`` never draws. It is set for data from a file; analytic distributions yield fresh points anyway.
    """

    name: str
    sample: Sampler
    temperature: float
    modes: Tensor | None = None
    holdout: Sampler | None = None

    def fresh(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw points for evaluation, independent of the training points."""
        return (self.holdout or self.sample)(n, generator)


def _mixture(name: str, centers: Tensor, spread: float, temperature: float) -> Toy:
    def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
        component = torch.randint(len(centers), (n,), generator=generator)
        return centers[component] + spread * torch.randn(n, 2, generator=generator)

    return Toy(name, sample, temperature, modes=centers)


def _bimodal() -> Toy:
    return _mixture("bimodal", torch.tensor([[-1.5, 0.0], [1.5, 0.0]]), 0.25, temperature=0.85)


def _eight_gaussians() -> Toy:
    angle = torch.arange(8) * (math.tau / 8)
    return _mixture(
        "eight-gaussians", 2 * torch.stack([angle.cos(), angle.sin()], dim=1), 0.15, temperature=0.5
    )


def _swiss_roll() -> Toy:
    def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
        # Angles from 1.5π to 4.5π with a density proportional to the radius: uniform along the arm.
        angle = 1.5 * math.pi * (1 + 8 * torch.rand(n, generator=generator)).sqrt()
        arm = torch.stack([angle * angle.cos(), angle * angle.sin()], dim=1) / (2.25 * math.pi)
        return arm + 0.05 * torch.randn(n, 2, generator=generator)

    return Toy("swiss-roll", sample, temperature=0.2)


def _checkerboard() -> Toy:
    def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
        column = torch.randint(4, (n,), generator=generator)
        row = 2 * torch.randint(2, (n,), generator=generator) + column % 2
        return torch.stack([column, row], dim=1) + torch.rand(n, 2, generator=generator) - 2

    cells = torch.tensor([(c - 1.5, r - 1.5) for c in range(4) for r in range(4) if (r - c) % 2 == 0])
    return Toy("checkerboard", sample, temperature=0.5, modes=cells)


def _two_moons() -> Toy:
    def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
        angle = math.pi * torch.rand(n, generator=generator)
        lower = torch.randint(2, (n,), generator=generator).bool()
        moon = torch.stack([angle.cos() - 0.5, angle.sin() - 0.25], dim=1)
        points = torch.where(lower[:, None], -moon, moon) * 1.5
        return points + 0.08 * torch.randn(n, 2, generator=generator)

    return Toy("two-moons", sample, temperature=0.35)


DISTRIBUTIONS: dict[str, Callable[[], Toy]] = {
    "bimodal": _bimodal,
    "eight-gaussians": _eight_gaussians,
    "swiss-roll": _swiss_roll,
    "checkerboard": _checkerboard,
    "two-moons": _two_moons,
}


@checked
def get_toy(name: str) -> Toy:
    """Return the distribution of that name, or of the points in a ``.npy`` file."""
    if name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name]()
    if name and (name.endswith(".npy") or Path(name).exists()):
        return from_points(load_points(Path(name)), Path(name).stem)
    raise unknown_name("distribution", name, [*DISTRIBUTIONS, "FILE.npy"])


def load_points(path: Path) -> Tensor:
    """Read and check the points ``[n, 2]`` of a ``.npy`` file, as float32."""
    if not path.exists():
        raise InputError(f"{path} does not exist: give a .npy file of points [n, 2]")
    array = read_array(path, "write one with numpy.save")
    if array.dtype.kind not in "fiu":
        raise InputError(f"{path} does not hold an array of numbers: write one with numpy.save")
    return _checked(torch.from_numpy(array.astype(np.float64)), str(path))


def from_points(points: Tensor, name: str = "points") -> Toy:
    """Return the distribution of given points ``[n, 2]``; a random half is held out for evaluation."""
    points = _checked(points, "points")
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    training, held_out = points[order[::2]], points[order[1::2]]

    def sampler(half: Tensor) -> Sampler:
        def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
            return half[torch.randint(len(half), (n,), generator=generator)]

        return sample

    temperature = 0.25 * float(pairwise_distance(training[:1024], held_out[:1024]).mean())
    return Toy(name, sampler(training), temperature, holdout=sampler(held_out))


def _checked(points: Tensor, name: str) -> Tensor:
    """Return the points in float32, or raise an error if they are unusable."""
    if points.ndim != 2 or points.shape[1] != 2:
        raise InputError(f"{name} has shape {list(points.shape)}: points must have shape [n, 2]")
    if len(points) < 4:
        raise InputError(
            f"{name} holds {len(points)} point(s): at least 4 are needed, half of them for evaluation"
        )
    not_finite = int((~points.isfinite()).any(dim=1).sum())
    if not_finite:
        raise InputError(
            f"{name} holds NaN or infinite values in {not_finite} of {len(points)} points: remove them"
        )
    if (points == points[0]).all():
        raise InputError(f"{name} holds {len(points)} copies of one point: give different points")
    spread = float(points.std(dim=0).max())
    if not 1e-6 <= spread <= 1e6:
        raise InputError(f"{name} has a standard deviation of {spread:.1e}: scale the points to about 1")
    if float(points.abs().max()) > 1e4 * spread:
        raise InputError(
            f"{name} is too far from 0 for its standard deviation of {spread:.1e}: subtract the mean"
        )
    return points.float()
