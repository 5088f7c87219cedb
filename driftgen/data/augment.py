"""What is done to an image each time it is drawn, many images at once.

Image number i of a draw is changed by row i of a table of uniform numbers that depends on the seed of the
draw alone, so that i and the seed decide, not how many images are loaded together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.data.decode import CROP_UNIFORMS, crop_boxes
from driftgen.support.rng import derive_generator

if TYPE_CHECKING:
    from driftgen.data.config import Augment

__all__ = ["change", "crop_resize", "crop_uniforms", "random_boxes", "uniforms"]

CHANGE, CROP = 1, 2  # two tables, so that turning one option on leaves the other's choices as they were


def uniforms(seed: int, table: int, first: int, n: int, columns: int) -> Tensor:
    """Rows ``first ... first + n`` of a table of uniform numbers."""
    rows = torch.rand(first + n, columns, generator=derive_generator(seed, table), dtype=torch.float64)
    return rows[first:]


def change(images: Tensor, augment: Augment, seed: int, first: int = 0) -> Tensor:
    """Flips and small affine changes of ``images [n, c, h, w]``, the crop excepted."""
    if not (augment.flip or augment.rotate or augment.zoom or augment.shift):
        return images
    table = uniforms(seed, CHANGE, first, len(images), 5).float()
    if augment.flip:
        images = torch.where((table[:, 0] < 0.5)[:, None, None, None], images.flip(3), images)
    if augment.rotate or augment.zoom or augment.shift:
        images = _affine(images, augment, 2 * table[:, 1:] - 1)
    return images


def _affine(images: Tensor, augment: Augment, draws: Tensor) -> Tensor:
    """Turns about the middle, enlarges and moves; the border is continued outwards. Bicubic: bilinear
    averages of neighbours would blur images of few pixels visibly.
    """
    height, width = images.shape[2:]
    angle = torch.deg2rad(augment.rotate * draws[:, 0])
    zoom = 1 + augment.zoom * draws[:, 1]
    right, down = augment.shift * draws[:, 2], augment.shift * draws[:, 3]
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    # From a place in the new image to the one in the old: back by the shift, then turned and shrunk.
    # Coordinates go from -1 to 1 over either side, hence the factors of the sides.
    across = torch.stack([cos, sin * (height / width), -(cos * right + sin * down) * (2 / width)], 1)
    along = torch.stack([-sin * (width / height), cos, (sin * right - cos * down) * (2 / height)], 1)
    grid = F.affine_grid(torch.stack([across, along], 1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return moved.clamp(-1, 1)  # bicubic curves swing a little beyond


def crop_uniforms(seed: int, first: int, n: int) -> Tensor:
    """The numbers that the random resized crops of a draw are made from."""
    return uniforms(seed, CROP, first, n, CROP_UNIFORMS)


def random_boxes(height: int, width: int, augment: Augment, seed: int, first: int, n: int) -> Tensor:
    """Random resized crops of images of one size: ``[n, 4]``, left, top, width and height."""
    table = crop_uniforms(seed, first, n).numpy()
    return torch.from_numpy(crop_boxes(width, height, table, augment.crop_scale))


def crop_resize(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """The part of each image within its box, bicubically resized to ``size``: two products with banded
    matrices, as Pillow's filter is (widened where it shrinks), but for all images at once.
    """
    height, width = images.shape[2:]
    parts = []
    for some, box in zip(images.split(1024), boxes.split(1024), strict=True):
        rows = _bicubic(box[:, 1], box[:, 3], height, size[0])[:, None]
        columns = _bicubic(box[:, 0], box[:, 2], width, size[1])[:, None]
        parts.append(rows @ some @ columns.transpose(2, 3))
    return torch.cat(parts) if parts else images.new_empty(0, images.shape[1], *size)


def _bicubic(start: Tensor, length: Tensor, total: int, size: int) -> Tensor:
    """Weights ``[n, size, total]`` of the old pixels in each new one, none outside the box."""
    start, length = start.float()[:, None, None], length.float()[:, None, None]
    stretch = (length / size).clamp(min=1)
    centre = start + (torch.arange(size)[:, None] + 0.5) * length / size
    place = torch.arange(total) + 0.5
    x = ((place - centre) / stretch).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    weights = torch.where((place > start) & (place < start + length), weights, 0.0)
    return weights / weights.sum(2, keepdim=True)
