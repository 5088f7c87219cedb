"""Relative errors for tests of kernels."""

import numpy as np
import torch


def error(got, exact):
    """Relative error in the Euclidean norm."""
    got, exact = (np.asarray(torch.as_tensor(t).detach().double().cpu()) for t in (got, exact))
    assert got.shape == exact.shape
    return np.linalg.norm(got - exact) / np.linalg.norm(exact)
