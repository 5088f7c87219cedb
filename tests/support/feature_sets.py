"""Random feature sets."""

import torch

from tests.support.golden_losses import samples

SHAPES = {"a": (3, 8), "b": (1, 8), "c": (2, 5), "d": (4, 8)}


def feature_sets(groups=4, n=6, p=5, m=3, dtype=torch.float32):
    """Draw generated, positive and negative feature sets."""
    return [
        {
            k: samples(groups, c, *shape, seed=i * 10 + j).to(dtype)
            for j, (k, shape) in enumerate(SHAPES.items())
        }
        for i, c in enumerate((n, p, m))
    ]
