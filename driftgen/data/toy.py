"""Two-dimensional distributions to watch a drift on."""

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

__all__ = ["DISTRIBUTIONS", "Toy", "from_points", "get_toy", "load_points"]


class Sampler(Protocol):
    """Draws n points."""

    def __call__(self, n: int, generator: torch.Generator | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Toy:
    """A distribution of points: ``sample(n, generator)`` draws ``[n, 2]``.

    ``temperature`` is a kernel width that suits it: below the size of its details, above the gaps that a
    drift must cross. ``modes`` are the centres of its equally likely modes, where it has such. ``holdout``
    draws points that ``sample`` never gives, which matters for data from a file; an ideal distribution has no
    end of fresh points.
    """

    name: str
    sample: Sampler
    temperature: float
    modes: Tensor | None = None
    holdout: Sampler | None = None

    def fresh(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Points to judge by, independent of those trained on."""
        return (self.holdout or self.sample)(n, generator)


def _mixture(name: str, centres: Tensor, spread: float, temperature: float) -> Toy:
    def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
        which = torch.randint(len(centres), (n,), generator=generator)
        return centres[which] + spread * torch.randn(n, 2, generator=generator)

    return Toy(name, sample, temperature, modes=centres)


def _bimodal() -> Toy:
    return _mixture("bimodal", torch.tensor([[-1.5, 0.0], [1.5, 0.0]]), 0.25, temperature=0.85)


def _eight_gaussians() -> Toy:
    angle = torch.arange(8) * (math.tau / 8)
    return _mixture(
        "eight-gaussians", 2 * torch.stack([angle.cos(), angle.sin()], dim=1), 0.15, temperature=0.5
    )


def _swiss_roll() -> Toy:
    def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
        # The square root makes the density even along the arm.
        angle = 1.5 * math.pi * (1 + 2 * torch.rand(n, generator=generator).sqrt())
        arm = torch.stack([angle * angle.cos(), angle * angle.sin()], dim=1) / (2.25 * math.pi)
        return arm + 0.05 * torch.randn(n, 2, generator=generator)

    return Toy("swiss-roll", sample, temperature=0.35)


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


def get_toy(name: str) -> Toy:
    """The distribution of that name, or that of the points in a ``.npy`` file."""
    if name in DISTRIBUTIONS:
        return DISTRIBUTIONS[name]()
    if isinstance(name, str) and name and (name.endswith(".npy") or Path(name).exists()):
        return from_points(load_points(Path(name)), Path(name).stem)
    raise unknown_name("distribution", name, [*DISTRIBUTIONS, "FILE.npy"])


def load_points(path: Path) -> Tensor:
    """The points of a ``.npy`` file, ``[n, 2]`` float32, checked."""
    try:
        with path.open("rb") as file:
            if file.read(6) != b"\x93NUMPY":
                raise ValueError("no NumPy array")
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist") from None
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise InputError(
            f"{path} is not a readable .npy array: write one with numpy.save ({error})"
        ) from None
    if array.dtype.kind not in "fiu":
        raise InputError(f"{path} does not hold an array of numbers: write one with numpy.save")
    return _checked(torch.from_numpy(array.astype(np.float64)), str(path))


def from_points(points: Tensor, name: str = "points") -> Toy:
    """The distribution of given points ``[n, 2]``: a random half is drawn from, the other half is held
    out.
    """
    points = _checked(points, "points")
    order = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))
    seen, held_out = points[order[::2]], points[order[1::2]]

    def sampler(half: Tensor) -> Sampler:
        def sample(n: int, generator: torch.Generator | None = None) -> Tensor:
            return half[torch.randint(len(half), (n,), generator=generator)]

        return sample

    temperature = 0.25 * float(pairwise_distance(seen[:1024], held_out[:1024]).mean())
    return Toy(name, sampler(seen), temperature, holdout=sampler(held_out))


def _checked(points: Tensor, where: str) -> Tensor:
    """The points in float32, or an error that says what is wrong with them."""
    if points.ndim != 2 or points.shape[1] != 2:
        raise InputError(f"{where} has shape {list(points.shape)}: points must have shape [n, 2]")
    if len(points) < 4:
        raise InputError(
            f"{where} holds {len(points)} point(s): at least 4 are needed, half of them to judge by"
        )
    bad = int((~points.isfinite()).any(dim=1).sum())
    if bad:
        raise InputError(
            f"{where} holds NaN or infinite values in {bad} of {len(points)} points: remove them"
        )
    if (points == points[0]).all():
        raise InputError(f"{where} holds {len(points)} copies of one point: there is nothing to learn")
    spread = float(points.std(dim=0).max())
    if not 1e-6 <= spread <= 1e6:
        raise InputError(f"{where} has a spread of {spread:.1e}: scale the points to about 1")
    if float(points.abs().max()) > 1e4 * spread:
        raise InputError(f"{where} lies too far from 0 for its spread of {spread:.1e}: subtract the mean")
    return points.float()
