"""Resolved loss options and the interfaces between passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from driftgen.drift.batching import Bucket
from driftgen.drift.kernels import Kernel
from driftgen.drift.normalization import Normalization

__all__ = [
    "PAPER_GUARDS",
    "RELEASE_GUARDS",
    "Combined",
    "DriftPass",
    "Engine",
    "Gradient",
    "Guards",
    "LossCall",
    "ScalePass",
    "Settings",
    "Statistics",
]


@dataclass(frozen=True)
class Guards:
    """Small constants that keep divisions and softmaxes within bounds; 0 means no bound."""

    self_distance: float  # added to the normalized distance of a sample to itself
    min_affinity: float
    min_distance: float
    min_scale: float  # lower bound of the mean distance and of the coordinate unit
    min_drift: float  # lower bound of the mean squared drift


PAPER_GUARDS = Guards(math.inf, 0.0, 0.0, 0.0, 0.0)
RELEASE_GUARDS = Guards(100.0, 1e-3, 1e-4, 1e-3, 1e-8)


@dataclass(frozen=True, eq=False)
class Settings:
    """Options of a loss with all names resolved. Compared by identity, so it can be a cache key."""

    temperatures: tuple[float, ...]
    kernel: Kernel
    normalization: Normalization
    attraction: float
    repulsion: float
    normalize_features: bool
    normalize_drift: bool
    guards: Guards
    weighted_softmax: bool  # weights count copies in softmax sums (paper), or only scale affinities (release)
    sum_vectors: bool  # sum the loss over the vectors of a feature (paper), or average it (release)
    process_group: dist.ProcessGroup | None
    chunk: int | None


@dataclass(frozen=True)
class Statistics:
    """Statistics of a whole batch: scale ``[F]``, E[‖V_τ‖² / D] ``[F, R]``, and its number of groups."""

    scale: Tensor
    drift: Tensor
    groups: int


@dataclass(frozen=True, eq=False)
class LossCall:
    """Inputs of one loss call.

    ``weight`` is ``[G, T]`` over y = [generated, negatives, positives]. ``statistics`` replace the measured
    statistics of the batch.
    """

    settings: Settings
    buckets: Sequence[Bucket]
    weight: Tensor | None
    statistics: Statistics | None
    needs_gradient: bool

    @property
    def is_shared(self) -> bool:
        """Return True if the processes of the group all-reduce their sums."""
        return self.settings.process_group is not None and self.statistics is None

    def all_reduce(self, sums: Tensor) -> None:
        """Add up ``sums`` over the processes that share the batch, in place."""
        if self.is_shared:
            dist.all_reduce(sums, group=self.settings.process_group)

    def gather(self, values: Tensor) -> Tensor:
        """Return the values of all processes that share the batch, ``[processes, ...]``. One all-reduce."""
        if not self.is_shared:
            return values[None]
        group = self.settings.process_group
        gathered = values.new_zeros(dist.get_world_size(group), *values.shape)
        gathered[dist.get_rank(group)] = values
        self.all_reduce(gathered)
        return gathered


class ScalePass(NamedTuple):
    """Result of the first pass: E_x E_y ‖φ(x) − φ(y)‖, ``[F]``, and the number of groups of the batch.

    ``buffers`` belong to the engine.
    """

    scale: Tensor
    groups: Tensor | int
    buffers: Any


class DriftPass(NamedTuple):
    """Result of the second pass: E[‖V_τ‖² / D], ``[F, R]``. ``buffers`` belong to the engine."""

    drift: Tensor
    buffers: Any


class Gradient(Protocol):
    """Gradient of the mean over all groups with respect to the generated features."""

    def compute(self, upstream: Tensor, saved: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients times ``upstream``, a scalar or ``[G]``, in the order of the buckets.

        ``saved`` are the tensors of :class:`Combined`.
        """
        ...


class Combined(NamedTuple):
    """Result of the third pass: the loss of the whole batch, the loss of each group, and the gradient.

    ``saved`` are the tensors that the gradient needs. Autograd frees them after the backward pass.
    """

    loss: Tensor
    per_group: Tensor
    gradient: Gradient | None = None
    saved: Sequence[Tensor] = ()


class Engine(Protocol):
    """The three passes over all problems of one process. An engine keeps no state between calls.

    Engines all-reduce two tensors: ``[F, 3]`` with Σ w ‖x − y‖, Σ w and the number of groups of each
    feature, and ``[F, R, R]`` with Σ ⟨V_τ, V_τ'⟩ in units of S². Without a floor of affinities, drifts may be
    smaller than any float: the eager engine then gathers the second tensor and the unit of V of each process.
    """

    def measure_scale(self) -> ScalePass:
        """Measure the mean distances of all features. First collective."""
        ...

    def measure_drift(self, scale: ScalePass) -> DriftPass:
        """Measure the drift norms, given the scale. Second collective. Consumes ``scale.buffers``."""
        ...

    def combine(self, scale: ScalePass, drift: DriftPass) -> Combined:
        """Combine the drifts of all temperatures. Consumes ``drift.buffers``."""
        ...
