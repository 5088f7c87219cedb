"""Images to evaluate, real or generated, as uint8 blocks that any process can load in any order."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from driftgen.data.config import Data
from driftgen.data.images import RealData, open_images
from driftgen.errors import InputError
from driftgen.evaluation.real_images import DIGITS, DIGITS_HELDOUT, load_bytes, open_in_shape
from driftgen.pipeline import DriftPipeline
from driftgen.support.rng import derive_seed

__all__ = ["BLOCK", "GeneratedImages", "ImageSource", "RealImages", "open_real"]

# Images of a block. The noise of a block depends on its number, so this number is part of every figure.
BLOCK = 500


class ImageSource(Protocol):
    """Images by index.

    Attributes:
        count: number of images.
        shape: ``(C, H, W)``.
        about: record for the JSON of a result.
    """

    count: int
    shape: tuple[int, int, int]
    about: dict[str, Any]

    def load(self, block: int) -> Tensor:
        """Return images ``BLOCK * block ...`` as uint8 ``[n, C, H, W]``."""
        ...

    def close(self) -> None:
        """Stop background workers."""
        ...


class RealImages:
    """Real images without augmentation."""

    def __init__(self, data: RealData, name: str) -> None:
        self.data, self.count, self.shape = data, len(data.labels), data.shape
        self.about: dict[str, Any] = {"data": name, "count": self.count, "shape": list(data.shape)}
        self._check_readable()

    def load(self, block: int) -> Tensor:
        """See :class:`ImageSource`."""
        indices = torch.arange(block * BLOCK, min((block + 1) * BLOCK, self.count))
        images = load_bytes(self.data, indices)
        self._check_readable()
        return images

    def close(self) -> None:
        self.data.close()

    def _check_readable(self) -> None:
        """Refuse unreadable images: training replaces them by others, which would change a figure."""
        unreadable = getattr(self.data, "unreadable", [])
        if unreadable:
            raise InputError(
                f"{len(unreadable)} images cannot be read: {unreadable[0]}; repair or remove them",
                topic="unreadable-images",
            )


class GeneratedImages:
    """Images of a pipeline, with labels in turn so that all classes are equally frequent.

    Floats become uint8 by truncation, as in the release.
    """

    def __init__(self, pipe: DriftPipeline, count: int, guidance: float | None = None, seed: int = 0) -> None:
        self.pipe, self.seed = pipe, seed
        self.guidance = pipe.check(guidance=guidance, seed=seed, output="numpy")
        self.labels = pipe.labels(None, max(count, 1))
        self.count = count
        self.about: dict[str, Any] = {"count": count, "guidance": self.guidance, "seed": seed}
        self.shape = self._shape()
        self.about["shape"] = list(self.shape)

    def load(self, block: int) -> Tensor:
        """See :class:`ImageSource`."""
        labels = self.labels[block * BLOCK : (block + 1) * BLOCK]
        seed = derive_seed(self.seed, block)
        parts = self.pipe.stream(labels, guidance=self.guidance, seed=seed, output="numpy")
        return torch.cat([torch.from_numpy(part).permute(0, 3, 1, 2) for part in parts])

    def close(self) -> None:
        """Do nothing: there are no background workers."""

    def _shape(self) -> tuple[int, int, int]:
        image = self.pipe(self.labels[:1], guidance=self.guidance, seed=0, output="numpy")
        height, width, channels = image.shape[1:]
        return channels, height, width


def open_real(name: str | Path, size: int | None = None, channels: Literal[1, 3] = 3) -> RealImages:
    """Open images of a path as in :func:`driftgen.data.images.open_images`, or the packaged ``digits``.

    Args:
        name: path, ``digits`` (training part) or ``digits-heldout``.
        size: side in pixels; None for the size of an array.
        channels: 1 or 3.
    """
    if str(name) in (DIGITS, DIGITS_HELDOUT):
        return RealImages(open_in_shape(str(name), (1, 8, 8)), str(name))
    config = Data(kind="images", path=str(name), size=size, channels=channels)
    return RealImages(open_images(config), Path(name).name)


def check_shapes(images: ImageSource, expected: tuple[int, int, int]) -> None:
    """Raise an InputError if images have another shape than those of the reference."""
    if images.shape != expected:
        (c, h, w), (rc, rh, rw) = images.shape, expected
        raise InputError(
            f"the images are {h}x{w} with {c} channels, those of the reference {rh}x{rw} with {rc}: "
            "evaluate against data of the same size"
        )


def block_digest(images: Tensor) -> str:
    """Return a SHA-256 of the pixels of a block."""
    return hashlib.sha256(images.contiguous().numpy().tobytes()).hexdigest()
