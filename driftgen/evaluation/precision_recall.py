"""Precision and recall by nearest neighbors (Kynkäänniemi et al. 2019), as computed by the release."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from driftgen.errors import InputError
from driftgen.support.checked_arguments import checked
from driftgen.support.dense_tensors import check_dense
from driftgen.support.whole_numbers import check_count

__all__ = ["PrecisionRecall", "manifold_radii", "precision_recall", "squared_distances"]


class PrecisionRecall(NamedTuple):
    """Precision: the fraction of generated samples on the real manifold. Recall: the converse."""

    precision: float
    recall: float


@checked
def precision_recall(real: Tensor, generated: Tensor, k: int = 3, chunk: int = 4096) -> PrecisionRecall:
    """Precision and recall of two sets of feature vectors, ``[n, ...]`` and ``[m, ...]``.

    A manifold is the union of balls around the samples of a set; the radius of a ball is the distance to the
    sample's k-th nearest neighbor. Mode collapse lowers only the recall. Both depend on n and m, so compare
    results of equal set sizes. At most ``chunk`` rows of the distance matrix are in memory at a time.
    """
    check_count("k", k)
    check_count("chunk", chunk)
    k, chunk = int(k), int(chunk)  # also of NumPy
    real, generated = feature_rows(real, generated, k + 1, k + 1)
    real_radii, generated_radii = manifold_radii(real, k, chunk), manifold_radii(generated, k, chunk)
    precise, recalled = [], torch.zeros(len(real), dtype=torch.bool, device=real.device)
    for rows, own_radii in zip(generated.split(chunk), generated_radii.split(chunk), strict=True):
        distances = squared_distances(rows, real)
        precise.append((distances <= real_radii).any(dim=1))
        recalled |= (distances <= own_radii[:, None]).any(dim=0)
    return PrecisionRecall(float(torch.cat(precise).double().mean()), float(recalled.double().mean()))


def manifold_radii(x: Tensor, k: int = 3, chunk: int = 4096) -> Tensor:
    """Return the squared distance of each row to its k-th nearest other row, ``[n]``."""
    if k < 1:
        raise InputError(f"k={k} must be at least 1")
    x = as_rows("x", x, k + 1).double()  # once, instead of in every chunk
    # k + 1, because the nearest row is the row itself.
    nearest = [squared_distances(rows, x).topk(k + 1, largest=False).values for rows in x.split(chunk)]
    return torch.cat(nearest).amax(dim=1)


def squared_distances(x: Tensor, y: Tensor) -> Tensor:
    """‖x − y‖² of all pairs, ``[n, m]``, in float64: the formula subtracts large numbers."""
    x, y = x.double(), y.double()
    squares = (x * x).sum(dim=1)[:, None] + (y * y).sum(dim=1)
    return torch.addmm(squares, x, y.T, alpha=-2).clamp_(min=0)


def feature_rows(
    real: Tensor, generated: Tensor, least_real: int, least_generated: int
) -> tuple[Tensor, Tensor]:
    """Flatten both sets with :func:`as_rows`, in float64 on the device of ``real``; check their widths."""
    real, generated = as_rows("real", real, least_real), as_rows("generated", generated, least_generated)
    if real.shape[1] != generated.shape[1]:
        raise InputError(
            f"real has {real.shape[1]} features, generated {generated.shape[1]}: both must be equal"
        )
    return real.double(), generated.to(real.device).double()


def as_rows(argument: str, x: Tensor, least: int) -> Tensor:
    """Flatten to ``[n, features]``; check that n is at least ``least`` and that all values are finite.

    Apple's GPUs have no float64: rows of such a device move to the CPU.
    """
    check_dense(argument, x)
    if x.ndim < 2 or len(x) < least:
        count = f"{least} row{'s' * (least > 1)}"
        raise InputError(f"{argument} has shape {list(x.shape)}, expected at least {count} of features")
    if not x.isfinite().all():
        raise InputError(f"{argument} holds NaN or infinite values: remove these samples")
    rows = x.detach().flatten(1)
    return rows.cpu() if rows.device.type == "mps" else rows
