"""Derive independent RNG streams from integers such as the seed of a run, a stream id and a step."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["derive_generator", "derive_seed"]


def derive_seed(*numbers: int) -> int:
    """Derive a 63-bit seed. Equal numbers give equal seeds, similar numbers give unrelated seeds."""
    # The count is included because SeedSequence treats (5) and (5, 0) alike.
    return int(np.random.SeedSequence([len(numbers), *numbers]).generate_state(1, np.uint64)[0] >> 1)


def derive_generator(*numbers: int) -> torch.Generator:
    """Return a CPU generator seeded with :func:`derive_seed` of these numbers.

    With such generators a step draws the same in an uninterrupted run, after a resume and in any process.
    """
    return torch.Generator().manual_seed(derive_seed(*numbers))
