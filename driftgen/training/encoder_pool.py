"""The encoders of a step: some of those of a run in turn, and one member of each pool.

Encoders have different blind spots. The loss of a step is that of the encoders it uses, its mean over the
steps that of all, and a step costs no more than these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from driftgen.errors import InputError
from driftgen.support.rng import derive_generator
from driftgen.training.build import build_encoder
from driftgen.training.config import Encoder

__all__ = ["StepEncoders"]

ORDER = 0  # RNG stream id, next to those of the members of a step


class _Pool(NamedTuple):
    """The tensors that an encoder computes with, and those of each member in the same order."""

    used: list[Tensor]
    members: list[list[Tensor]]


class StepEncoders:
    """Chooses the encoders of each step.

    All members of a pool are on the device; the weights of one are copied before a step. The copy is in
    place, so that a captured CUDA graph and compiled blocks compute with it.

    Args:
        entries: encoders of the configuration.
        networks: the encoder of each entry, with the weights of its ``path``.
        per_step: number of entries that a step uses, in turn; None for all. The order of a round is random:
            otherwise the steps that are measured, every 10th for example, could all have the same encoder.
        seed: seed and stream of the draws.

    Attributes:
        used: positions of the entries in use.
    """

    def __init__(
        self, entries: Sequence[Encoder], networks: Sequence[nn.Module], per_step: int | None, *seed: int
    ) -> None:
        self.count = len(entries)
        self.per_step = self.count if per_step is None else min(per_step, self.count)
        self.seed = seed
        self.used = self.entries(0)
        self.pools = [
            _open(entry, network, f"encoders.{i}.pool") if entry.pool else None
            for i, (entry, network) in enumerate(zip(entries, networks, strict=True))
        ]

    def draw(self, step: int) -> list[int]:
        """Return the member of each encoder at a step: 0 is its ``path``, then ``pool`` in order."""
        random = derive_generator(*self.seed, step)
        sizes = [len(pool.members) if pool else 1 for pool in self.pools]
        return [int(torch.randint(size, (), generator=random)) for size in sizes]

    def entries(self, step: int) -> tuple[int, ...]:
        """Return the positions of the entries that a step uses."""
        if self.per_step == self.count:
            return tuple(range(self.count))
        steps = self.count // math.gcd(self.count, self.per_step)  # of a round
        number, place = divmod(step, steps)
        order = torch.randperm(steps, generator=derive_generator(*self.seed, number, ORDER))
        first = int(order[place]) * self.per_step
        return tuple(sorted((first + i) % self.count for i in range(self.per_step)))

    @torch.no_grad()
    def choose(self, step: int) -> None:
        """Choose the entries of a step, and give each pool the weights of its member."""
        self.used = self.entries(step)
        if not any(self.pools):
            return
        for pool, member in zip(self.pools, self.draw(step), strict=True):
            if pool is not None:
                torch._foreach_copy_(pool.used, pool.members[member])


def _open(entry: Encoder, network: nn.Module, where: str) -> _Pool:
    state = network.state_dict()
    first = [tensor.clone() for tensor in state.values()]
    members = [first]
    for path in entry.pool:
        other = build_encoder(entry.model_copy(update={"path": path}), where).state_dict()
        if {n: t.shape for n, t in other.items()} != {n: t.shape for n, t in state.items()}:
            raise InputError(
                f"{where}: {path} has other weights than {entry.path}: encoders of a pool need the same "
                "options"
            )
        members.append([torch.empty_like(kept).copy_(other[n]) for n, kept in state.items()])
    return _Pool(list(state.values()), members)
