"""What a loss was told to do, and what the passes hand each other: plain values, no arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from driftgen.drift.kernels import Kernel
from driftgen.drift.normalization import Normalization

__all__ = [
    "PAPER_GUARDS",
    "RELEASE_GUARDS",
    "Engine",
    "Finished",
    "Gradient",
    "Guards",
    "Settings",
    "Statistics",
]


@dataclass(frozen=True)
class Guards:
    """The small constants that keep divisions and softmaxes in bounds."""

    self_distance: float  # added to the normalised distance of a sample to itself
    least_affinity: float
    least_distance: float
    least_scale: float  # of the mean distance, and of the unit of the coordinates
    least_drift: float  # of the mean squared drift


PAPER_GUARDS = Guards(math.inf, 0.0, 0.0, 0.0, 0.0)
RELEASE_GUARDS = Guards(100.0, 1e-3, 1e-4, 1e-3, 1e-8)


@dataclass(frozen=True, eq=False)
class Settings:
    """What a loss was told to do, names resolved. Each loss has its own: equal only to itself, it is quickly
    found by.
    """

    temperatures: tuple[float, ...]
    kernel: Kernel
    normalization: Normalization
    attraction: float
    repulsion: float
    normalize_features: bool
    normalize_drift: bool
    guards: Guards
    weigh_kernel: bool  # weights count copies (paper), or multiply affinities only (release)
    sum_vectors: bool  # one loss per vector, all summed (paper), or their mean per feature (release)
    process_group: dist.ProcessGroup | None
    chunk: int | None


@dataclass(frozen=True)
class Statistics:
    """What the parts of one batch share: the scale ``[features]``, E[‖V_τ‖² / D] ``[features, R]``, and the
    number of groups of the whole batch.
    """

    scale: Tensor
    drift: Tensor
    groups: int


class Gradient(Protocol):
    """The gradient of the mean over all groups to the generated features, in the order of the buckets."""

    def read(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """It times ``upstream``, one number for all groups or for each; ``saved`` as :class:`Finished` gave
        them.
        """
        ...


class Finished(NamedTuple):
    """What the last pass gives: the loss of each group, and where its gradient comes from, if it is wanted.

    ``saved`` are the tensors that are needed for it, so that they can be let go as soon as it has been read.
    """

    per_group: Tensor
    gradient: Gradient | None = None
    saved: Sequence[Tensor] = ()


class Engine(Protocol):
    """The arithmetic of the passes over all problems of one process. ``[F]`` is by feature."""

    def sum_distances(self) -> Tensor:
        """Σ w ‖x − y‖ of each feature, ``[F]``."""
        ...

    def sum_products(self, kernel_unit: Tensor, unit: Tensor) -> Tensor:
        """Σ ⟨V_τ, V_τ'⟩ of each feature, ``[F, R, R]``, with distances in units of ``kernel_unit`` and
        drifts in units of ``unit``, both ``[F]``.
        """
        ...

    def finish(self, inverse_norm: Tensor, share: Tensor, factor: Tensor, size: Tensor) -> Finished:
        """Ṽ = Σ_τ V_τ / λ_τ, given 1/λ ``[F, R]``: Σ share · ‖Ṽ‖² of each group, and the gradient factor · Ṽ
        if the engine was made for it. ``size`` is the typical size of Ṽ, a power of two; all ``[F]``.
        """
        ...
