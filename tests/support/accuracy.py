"""Relative errors for tests of kernels."""

import numpy as np
import torch


def error(found, exact):
    """Relative error in the Euclidean norm."""
    found, exact = (np.asarray(torch.as_tensor(t).detach().double().cpu()) for t in (found, exact))
    assert found.shape == exact.shape
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)
