"""Sheets of samples, of real images and of nearest training images that a run leaves in ``samples/``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from driftgen.data.arrays import ArrayImages
from driftgen.data.config import Augment
from driftgen.data.images import RealData
from driftgen.errors import InputError
from driftgen.evaluation.encoders import PIXELS, load_encoder
from driftgen.evaluation.neighbors import CosineNeighbors
from driftgen.evaluation.real_images import load_bytes
from driftgen.pipeline import DriftPipeline
from driftgen.support.images import to_pil, to_uint8
from driftgen.support.rng import RNGState
from driftgen.support.sheets import Sheet, write_sheet

__all__ = ["NEAREST", "REAL", "preview_labels", "save_nearest", "save_real", "save_samples"]

REAL, NEAREST = "real.png", "nearest.png"  # beside step-0000000.png, ...
CLASSES, EACH = 10, 10
COMPARED, NEIGHBORS = 8, 5  # samples with their nearest training images, and how many of these
BATCH = 2048  # training images compared at a time
VALUES = 2**31  # training pixels that are compared at most: a few seconds


def preview_labels(num_classes: int) -> list[int]:
    """Return the classes of a preview: rows of 10 of each of the first 10 classes, or 100 of a single one."""
    classes = min(CLASSES, num_classes)
    return [label for label in range(classes) for _ in range(EACH if classes > 1 else CLASSES * EACH)]


def save_samples(pipe: DriftPipeline, num_classes: int, path: Path, *, seed: int) -> Tensor | None:
    """Write a sheet of samples, one row per class; return the samples.

    Every call with one seed has the same noise. Returns None if samples are no images, such as latents
    without a tokenizer.
    """
    try:
        samples: Tensor = pipe(preview_labels(num_classes), seed=seed, output="tensor")
        images = to_pil(to_uint8(samples))
    except InputError:
        return None
    write_sheet(path, Sheet(images, EACH, row_names(pipe.class_names)))
    return samples


def save_real(data: RealData, pipe: DriftPipeline, path: Path) -> Path | None:
    """Write a sheet of real images without augmentation, in the rows of :func:`save_samples`.

    Latents are decoded. Returns None if there is nothing to show.
    """
    chosen = []
    for label in sorted(set(preview_labels(len(data.class_names)))):
        members = (data.labels == label).nonzero()[:, 0]
        each = EACH if len(data.class_names) > 1 else CLASSES * EACH
        chosen.append(members[torch.arange(each) % len(members)])  # a small class repeats its images
    before = RNGState.save(torch.device("cpu"))  # datasets passed from Python may draw
    try:
        images = plain(data).load(torch.cat(chosen), 0)
        if images.shape[1] not in (1, 3):
            images = pipe.tokenizer.decode(images.to(pipe.device)).float()
        pictures = to_pil(to_uint8(_fit(images, data.shape)))
    except InputError:
        return None
    finally:
        before.restore(torch.device("cpu"))
    return write_sheet(path, Sheet(pictures, EACH, row_names(data.class_names)))


def save_nearest(samples: Tensor, num_classes: int, data: RealData, path: Path) -> Path | None:
    """Write a sheet of a few samples beside their nearest training images: cosine similarity of pixels.

    ``samples`` are those of :func:`save_samples`. Returns None unless the training images are an array in
    memory of the same shape, and few enough to search within seconds on a CPU.
    """
    known, images = len(data.labels), samples.shape[1:]
    if not isinstance(data, ArrayImages) or known <= NEIGHBORS or known * images.numel() > VALUES:
        return None
    training, labels = plain(data), preview_labels(num_classes)
    step = EACH if num_classes > 1 else 1
    chosen = list(range(0, len(labels), step))[:COMPARED]
    queries = torch.from_numpy(to_uint8(samples[chosen])).permute(0, 3, 1, 2)
    if load_bytes(training, torch.arange(1)).shape[1:] != queries.shape[1:]:
        return None  # random crops of larger images
    encoder = load_encoder(PIXELS)
    search = CosineNeighbors(encoder(queries), NEIGHBORS)
    for batch in torch.arange(known).split(BATCH):
        search.update(encoder(load_bytes(training, batch)))
    pictures: list[Image.Image] = []
    captions: list[str] = []
    names = data.class_names if num_classes > 1 else [""] * num_classes
    for sample, indices, similarities in zip(chosen, search.indices, search.similarities, strict=True):
        found = load_bytes(training, indices).float() / 127.5 - 1
        pictures += to_pil(to_uint8(torch.cat([samples[sample, None].cpu(), found.cpu()])))
        captions.append(names[labels[sample]])
        captions += [
            _caption(value, names[int(data.labels[i])])
            for i, value in zip(indices.tolist(), similarities.tolist(), strict=True)
        ]
    columns = ("sample", *("nearest" if k == 1 else f"{k}." for k in range(1, NEIGHBORS + 1)))
    return write_sheet(path, Sheet(pictures, 1 + NEIGHBORS, (), columns, captions))


def plain(data: RealData) -> RealData:
    """Return the data without augmentation. Workers are shared, so only the original is closed."""
    same = copy.copy(data)
    if hasattr(same, "augment"):
        same.augment = Augment()
    if hasattr(same, "flip"):
        same.flip = False
    return same


def row_names(class_names: Sequence[str] | None) -> Sequence[str]:
    """Return the names of the rows of a preview; none for a single class."""
    return () if class_names is None or len(class_names) < 2 else class_names[:CLASSES]


def _fit(images: Tensor, shape: Sequence[int]) -> Tensor:
    """Crop the center of images and resize it, if only random crops of them have the shape."""
    height, width = shape[1:]
    if len(shape) != 3 or images.shape[1] != shape[0] or images.shape[2:] == (height, width):
        return images
    scale = min(images.shape[2] / height, images.shape[3] / width)
    h, w = round(height * scale), round(width * scale)
    top, left = (images.shape[2] - h) // 2, (images.shape[3] - w) // 2
    crop = images[:, :, top : top + h, left : left + w]
    return F.interpolate(crop, size=(height, width), mode="bilinear", antialias=True)


def _caption(similarity: float, name: str) -> str:
    return f"{similarity:.3f} ({name})" if name else f"{similarity:.3f}"
