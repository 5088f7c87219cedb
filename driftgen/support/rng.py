"""Randomness that depends on nothing but a few numbers: the seed of a run, the step, a position in it."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["derive_generator", "derive_seed"]


def derive_seed(*numbers: int) -> int:
    """A 63-bit seed, well mixed: near numbers give unrelated seeds, the same numbers always the same."""
    # Their count too: numpy would take (5) and (5, 0) for the same.
    return int(np.random.SeedSequence([len(numbers), *numbers]).generate_state(1, np.uint64)[0] >> 1)


def derive_generator(*numbers: int) -> torch.Generator:
    """A CPU generator that starts from :func:`derive_seed` these numbers.

    So a step draws the same whether it is reached in one go, after a resume, or by one of many processes.
    """
    return torch.Generator().manual_seed(derive_seed(*numbers))
