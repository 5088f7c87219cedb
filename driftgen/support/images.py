"""Convert samples to uint8, PIL images and contact sheets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["contact_sheet", "rounded_bytes", "to_bytes", "to_pil", "to_uint8"]


def to_uint8(images: Tensor) -> NDArray[np.uint8]:
    """Convert ``[B, C, H, W]`` in [-1, 1] to an array of :func:`to_bytes`."""
    array: NDArray[np.uint8] = to_bytes(images).cpu().numpy()
    return array


def to_bytes(images: Tensor) -> Tensor:
    """Convert ``[B, C, H, W]`` in [-1, 1] to uint8 ``[B, H, W, C]``, on their device: ⌊255 · (x + 1) / 2⌋,
    clipped.

    Truncates instead of rounding, as the release does before evaluation. NaN becomes 0.
    """
    if images.ndim != 4:
        raise InputError(f"images has shape {list(images.shape)}, expected [B, C, H, W]")
    unit = torch.nan_to_num((images.detach().float() + 1) / 2, nan=0.0).clamp(0, 1)
    return (unit * 255).to(torch.uint8).permute(0, 2, 3, 1)


def rounded_bytes(images: Tensor) -> Tensor:
    """Convert ``[B, C, H, W]`` that were read from uint8 images back to them.

    Rounds: converting bytes to floats is not exact, so :func:`to_bytes` would lower some by 1.
    """
    return ((images + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def to_pil(pixels: NDArray[np.uint8]) -> list[Image.Image]:
    """Convert uint8 ``[B, H, W, C]`` to PIL images: gray for one channel, color for three."""
    from PIL import Image

    channels = pixels.shape[-1]
    if channels not in (1, 3):
        raise InputError(f"images have {channels} channels, expected 1 (gray) or 3 (color)")
    return [Image.fromarray(image[..., 0] if channels == 1 else image) for image in pixels]


def contact_sheet(
    images: Sequence[Image.Image], columns: int | None = None, gap: int = 2, below: int = 0
) -> Image.Image:
    """Arrange images in rows on a white sheet, about square unless ``columns`` is given.

    ``below`` leaves as many more pixels under every row, for captions.

    Small images are enlarged without smoothing, so that 8-pixel digits are legible.
    """
    from PIL import Image

    if not images:
        raise InputError("images is empty: give at least one image")
    columns = min(len(images), columns or math.ceil(math.sqrt(len(images))))
    width, height = images[0].size
    zoom = max(1, 64 // max(width, height))
    width, height = width * zoom, height * zoom
    rows = math.ceil(len(images) / columns)
    size = (columns * (width + gap) + gap, rows * (height + gap + below) + gap)
    sheet = Image.new(images[0].mode, size, "white")
    for i, image in enumerate(images):
        row, column = divmod(i, columns)
        corner = (gap + column * (width + gap), gap + row * (height + gap + below))
        sheet.paste(image.resize((width, height), Image.Resampling.NEAREST), corner)
    return sheet
