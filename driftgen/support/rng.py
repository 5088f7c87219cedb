"""Derive independent RNG streams from integers such as the seed of a run, a stream id and a step."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from driftgen.errors import InputError

__all__ = ["RNGState", "derive_generator", "derive_seed"]


def derive_seed(*numbers: int) -> int:
    """Derive a 63-bit seed. Equal numbers give equal seeds, similar numbers give unrelated seeds."""
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 0:
            raise InputError(f"seed={number!r} must be an integer from 0 to 2^63 - 1")
    # The count is included because SeedSequence treats (5) and (5, 0) alike.
    state = np.random.SeedSequence([len(numbers), *numbers]).generate_state(1, np.uint64)
    return int(state[0]) >> 1  # an int first: NumPy 1 does not shift a uint64 by an int


def derive_generator(*numbers: int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed` of these numbers.

    With such generators a step draws the same in an uninterrupted run, after a resume and in any process.
    """
    return torch.Generator().manual_seed(derive_seed(*numbers))


class RNGState(NamedTuple):
    """State of PyTorch's default generators: that of the CPU, and that of one GPU if there is one."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def save(cls, device: torch.device) -> RNGState:
        """Return the current state. It lies in host memory, so the GPU is not waited for."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def restore(self, device: torch.device) -> None:
        """Set the generators to this state."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, device)
