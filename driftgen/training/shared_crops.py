"""Crops that the real and generated samples of a class share: a step compares them in many views.

A generator trained against one encoder may learn its blind spots: its samples then match real ones in φ and
differ in other networks. φ of a crop is another feature map, and its drift is zero at equilibrium as well
(Eq. "asym", for any φ), so each step may draw one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from driftgen.data.augment import crop_resize

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

        Bicubic, by matrix products: the gradient has no atomic additions, so that two runs are equal. A
        square of side 1 changes no bit.
        """
        height, width = samples.shape[2:]
        side, top, left = squares.unbind(1)
        boxes = torch.stack([left * width, top * height, side * width, side * height], 1)
        with torch.autocast(samples.device.type, enabled=False):
            each = boxes.repeat_interleave(len(samples) // len(squares), 0)
            return crop_resize(samples.float(), each, (height, width)).to(samples.dtype)
