"""Crops that the real and generated samples of a class share: a step compares them in many views.

A generator trained against one encoder learns its blind spots: its samples match real ones in φ and differ in
other networks. φ of a crop is another feature map, and its drift is zero at equilibrium as well (Eq. "asym",
for any φ), so each step may draw one.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["SharedCrops"]


class SharedCrops:
    """Crops all samples of a class to the same random square and enlarges it to their size.

    Args:
        share: probability that a class is cropped; its samples stay as they are otherwise.
        scale: smallest and largest side of the square, as a share of the side of the sample.
    """

    def __init__(self, share: float, scale: tuple[float, float]) -> None:
        self.share, self.scale = share, scale

    def draw(self, classes: int, randomness: torch.Generator) -> Tensor:
        """Return the square of each class, ``[C, 3]``: side, and the top left corner as shares of the side
        of the sample.
        """
        chosen, size, y, x = torch.rand(4, classes, generator=randomness)
        low, high = self.scale
        side = torch.where(chosen < self.share, low + (high - low) * size, 1.0)
        return torch.stack([side, y * (1 - side), x * (1 - side)], 1)

    def __call__(self, samples: Tensor, squares: Tensor) -> Tensor:
        """Return the crops ``[C · n, ...]`` of samples ``[C · n, channels, height, width]``.

        Bilinear interpolation, as two products with sparse matrices: its gradient has no atomic additions,
        so that two runs are equal. A square of side 1 changes no bit.
        """
        height, width = samples.shape[2:]
        side, top, left = squares.to(torch.float32).unbind(1)
        with torch.autocast(samples.device.type, enabled=False):
            groups = samples.float().unflatten(0, (len(squares), -1))
            rows, columns = interpolation(side, top, height), interpolation(side, left, width)
            cropped: Tensor = rows[:, None, None] @ groups @ columns[:, None, None].mT
        return cropped.flatten(0, 1).to(samples.dtype)


def interpolation(side: Tensor, start: Tensor, pixels: int) -> Tensor:
    """Return the matrix ``[C, pixels, pixels]`` that reads a row of pixels at the points of a crop.

    Point i lies at start · n + (i + ½) side − ½, and its weights are those of the two nearest pixels; points
    beyond the outermost pixel centers take that pixel.
    """
    index = torch.arange(pixels, device=side.device, dtype=torch.float32)
    points = start[:, None] * pixels + (index + 0.5) * side[:, None] - 0.5
    distance = (points.clamp(0, pixels - 1)[:, :, None] - index).abs()
    return (1 - distance).clamp(min=0)
