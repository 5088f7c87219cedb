"""Sheets of samples, of real images and of nearest training images that a run leaves in ``samples/``."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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
from driftgen.support.rng import RNGState, derive_generator
from driftgen.support.sheets import Sheet, write_sheet

__all__ = ["NEAREST", "REAL", "preview_labels", "save_nearest", "save_real", "save_samples"]

REAL, NEAREST = "real.png", "nearest.png"  # beside step-0000000.png, ...
CLASSES, EACH = 10, 10
COMPARED, NEIGHBORS = 8, 5  # samples with their nearest training images, and how many of these
# Limits of the search for nearest training images.
SECONDS = 20.0
MOST_IMAGES = 20_000  # read from files or from a dataset
VALUES = 2**31  # pixels of an array in memory: a few seconds
BATCH_VALUES = 2**24  # pixels compared at a time


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


def save_nearest(
    samples: Tensor,
    num_classes: int,
    data: RealData,
    path: Path,
    info: Callable[[str], None] = lambda text: None,
) -> Path | None:
    """Write a sheet of a few samples beside their nearest training images: cosine similarity of pixels.

    The search takes about ``SECONDS`` at most. It reads at most ``MOST_IMAGES`` images, chosen at random,
    unless the data are an array in memory. A line below the sheet says how many were compared. No other
    thread may load the data at the same time.

    Args:
        samples: those of :func:`save_samples`.
        num_classes: number of classes of the model.
        data: training images.
        path: of the sheet.
        info: receives the reason as one line if the images cannot be read: a sheet must not end a run.

    Returns:
        The path; None if there is no sheet, because the data are latents or have too few images.
    """
    if len(data.labels) <= NEIGHBORS or tuple(samples.shape[1:]) != tuple(data.shape):
        return None
    labels, step = preview_labels(num_classes), EACH if num_classes > 1 else 1
    chosen = list(range(0, len(labels), step))[:COMPARED]
    queries = torch.from_numpy(to_uint8(samples[chosen])).permute(0, 3, 1, 2)
    before = RNGState.save(torch.device("cpu"))  # datasets passed from Python may draw
    try:
        nearest = _search(queries, data)
    except Exception as error:  # datasets passed from Python may raise anything
        info(f"no nearest training images in the report: {' '.join(str(error).split())[:300]}")
        return None
    finally:
        before.restore(torch.device("cpu"))
    pictures: list[Image.Image] = []
    captions: list[str] = []
    names = data.class_names if num_classes > 1 else [""] * num_classes
    for query, sample, images, indices, similarities in zip(queries, chosen, *nearest[:3], strict=True):
        pictures += to_pil(torch.cat([query[None], images]).permute(0, 2, 3, 1).numpy())
        captions.append(names[labels[sample]])
        captions += [
            _caption(value, names[int(data.labels[i])])
            for i, value in zip(indices.tolist(), similarities.tolist(), strict=True)
        ]
    columns = ("sample", *("nearest" if k == 1 else f"{k}." for k in range(1, NEIGHBORS + 1)))
    note = _comparison(nearest.compared, len(data.labels))
    return write_sheet(path, Sheet(pictures, 1 + NEIGHBORS, (), columns, captions, note))


class _Nearest(NamedTuple):
    """The nearest training images of n samples.

    Attributes:
        images: uint8 ``[n, NEIGHBORS, C, H, W]``.
        indices: ``[n, NEIGHBORS]``, indices of these images in the data.
        similarities: ``[n, NEIGHBORS]``, highest first.
        compared: number of training images that the samples were compared with.
    """

    images: Tensor
    indices: Tensor
    similarities: Tensor
    compared: int


def _search(queries: Tensor, data: RealData) -> _Nearest:
    """Find the nearest training images of uint8 images ``[n, C, H, W]`` within the limits above.

    The images found are kept, not loaded again: a dataset passed from Python may return other pixels then.
    """
    started, training, values = time.monotonic(), plain(data), queries[0].numel()
    most, batch_size = (VALUES // values, 2048) if isinstance(data, ArrayImages) else (MOST_IMAGES, 64)
    batch_size = min(batch_size, max(BATCH_VALUES // values, 8))
    known = len(data.labels)
    # In random order, because time may run out before the last image.
    order = torch.randperm(known, generator=derive_generator(known))[: max(most, NEIGHBORS + 1)]
    encoder = load_encoder(PIXELS)
    search = CosineNeighbors(encoder(queries), NEIGHBORS)
    kept: dict[int, Tensor] = {}
    for part in order.split(batch_size):
        first = search.seen
        if first > NEIGHBORS and time.monotonic() - started > SECONDS:
            break
        images = _fit(load_bytes(training, part).cpu().float(), data.shape).round().to(torch.uint8)
        search.update(encoder(images))
        wanted = set(search.indices.flatten().tolist())
        kept = {i: image for i, image in kept.items() if i in wanted}
        kept |= {i: images[i - first].clone() for i in wanted if i >= first}
    rows = [torch.stack([kept[i] for i in row]) for row in search.indices.tolist()]
    return _Nearest(torch.stack(rows), order[search.indices], search.similarities, search.seen)


def _comparison(count: int, known: int) -> str:
    if count == known:
        return f"compared with all {known:,} training images"
    return f"compared with {count:,} of {known:,} training images, chosen at random"


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
