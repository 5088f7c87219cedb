"""Batched augmentation.

Image i of a draw is augmented by row i of a table of uniform numbers that depends only on the seed.
The result therefore depends on i and the seed, not on how many images are loaded together.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.data.config import Augment
from driftgen.data.decode import CROP_UNIFORMS, crop_boxes
from driftgen.support.rng import derive_generator

__all__ = [
    "crop_resize",
    "crop_uniforms",
    "draw_flips",
    "flip_and_warp",
    "random_boxes",
    "uniforms",
    "without_augmentation",
]

Images = TypeVar("Images")
WARP, CROP = 1, 2  # separate RNG streams, so that enabling one option does not change the other's draws


def without_augmentation(images: Images) -> Images:
    """Return a copy of real data that loads images as they are; pixels and files are shared."""
    plain: Any = copy.copy(images)
    plain.augment = Augment()
    return cast(Images, plain)


def uniforms(seed: int, table: int, first: int, n: int, columns: int) -> Tensor:
    """Return rows ``first ... first + n - 1`` of a table of uniform numbers."""
    rows = torch.rand(first + n, columns, generator=derive_generator(seed, table), dtype=torch.float64)
    return rows[first:]


def flip_and_warp(images: Tensor, augment: Augment, seed: int, first: int = 0) -> Tensor:
    """Apply random flips and small affine transforms to ``images [n, c, h, w]``; crops are separate."""
    if not (augment.flip or augment.rotate or augment.zoom or augment.shift):
        return images
    table = uniforms(seed, WARP, first, len(images), 5).float().to(images.device, non_blocking=True)
    if augment.flip:
        images = torch.where((table[:, 0] < 0.5)[:, None, None, None], images.flip(3), images)
    if augment.rotate or augment.zoom or augment.shift:
        images = _affine(images, augment, 2 * table[:, 1:] - 1)
    return images


def draw_flips(seed: int, first: int, n: int) -> Tensor:
    """Return True for the images that :func:`flip_and_warp` flips."""
    return uniforms(seed, WARP, first, n, 5)[:, 0].float() < 0.5


def _affine(images: Tensor, augment: Augment, draws: Tensor) -> Tensor:
    """Rotate about the center, zoom and shift, with replicated borders.

    Bicubic, because bilinear interpolation visibly blurs images of few pixels.
    """
    height, width = images.shape[2:]
    angle = torch.deg2rad(augment.rotate * draws[:, 0])
    zoom = 1 + augment.zoom * draws[:, 1]
    right, down = augment.shift * draws[:, 2], augment.shift * draws[:, 3]
    cos, sin = angle.cos() / zoom, angle.sin() / zoom
    # The inverse map, from output to input coordinates: undo the shift, then rotate and scale.
    # Coordinates run from -1 to 1 along each side, hence the ratios of the sides.
    row_x = torch.stack([cos, sin * (height / width), -(cos * right + sin * down) * (2 / width)], 1)
    row_y = torch.stack([-sin * (width / height), cos, (sin * right - cos * down) * (2 / height)], 1)
    grid = F.affine_grid(torch.stack([row_x, row_y], 1), list(images.shape), align_corners=False)
    warped = F.grid_sample(images, grid, mode="bicubic", padding_mode="border", align_corners=False)
    return warped.clamp(-1, 1)  # bicubic interpolation overshoots


def crop_uniforms(seed: int, first: int, n: int) -> Tensor:
    """Return the uniform numbers that determine the random resized crops of a draw."""
    return uniforms(seed, CROP, first, n, CROP_UNIFORMS)


def random_boxes(height: int, width: int, augment: Augment, seed: int, first: int, n: int) -> Tensor:
    """Return random resized crops ``[n, 4]`` (left, top, width, height) for images of one size."""
    table = crop_uniforms(seed, first, n).numpy()
    return torch.from_numpy(crop_boxes(width, height, table, augment.crop_scale))


def crop_resize(images: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Crop each image to its box and resize it to ``size`` bicubically.

    Computes Pillow's filter, which widens when it shrinks an image, as two products with banded matrices for
    all images at once.
    """
    height, width = images.shape[2:]
    boxes, resized = boxes.to(images.device, non_blocking=True), []
    for chunk, box in zip(images.split(1024), boxes.split(1024), strict=True):
        rows = _bicubic(box[:, 1], box[:, 3], height, size[0])[:, None]
        columns = _bicubic(box[:, 0], box[:, 2], width, size[1])[:, None]
        resized.append(rows @ chunk @ columns.transpose(2, 3))
    return torch.cat(resized) if resized else images.new_empty(0, images.shape[1], *size)


def _bicubic(start: Tensor, length: Tensor, total: int, size: int) -> Tensor:
    """Compute the weights ``[n, size, total]`` of input pixels in each output pixel; 0 outside the box."""
    start, length = start.float()[:, None, None], length.float()[:, None, None]
    stretch = (length / size).clamp(min=1)
    center = start + (torch.arange(size, device=start.device)[:, None] + 0.5) * length / size
    pixel = torch.arange(total, device=start.device) + 0.5
    x = ((pixel - center) / stretch).abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
    weights = torch.where((pixel > start) & (pixel < start + length), weights, 0.0)
    return weights / weights.sum(2, keepdim=True)
