"""Arrays of images, held in memory as uint8."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from driftgen.data.augment import crop_resize, flip_and_warp, random_boxes
from driftgen.data.classes import choose
from driftgen.data.decode import center_crop
from driftgen.errors import InputError
from driftgen.support.peak_memory import check_fits
from driftgen.support.untrusted_files import open_regular, read_array, read_arrays, reading

if TYPE_CHECKING:
    from driftgen.data.config import Augment, Data

__all__ = ["ArrayImages", "from_arrays", "in_memory", "open_array", "to_float"]

IMAGES, LABELS = ("images", "x", "x_train", "arr_0"), ("labels", "y", "y_train")


class ArrayImages:
    """Images in memory as uint8 ``[n, c, h, w]``.

    Args:
        pixels: uint8 values; b represents b / ``half`` - 1.
        labels: class of each image.
        class_names: name of each class.
        augment: random changes applied whenever an image is loaded.
        half: the value that represents 0.
        channels: 3 repeats gray images to three channels.
        size: side of a random resized crop; None for the size of ``pixels``.
    """

    decodes = False

    def __init__(
        self,
        pixels: Tensor,
        labels: Tensor,
        class_names: list[str],
        augment: Augment,
        *,
        half: float = 127.5,
        channels: int = 1,
        size: int | None = None,
    ) -> None:
        self.pixels, self.labels, self.class_names, self.half = pixels, labels, class_names, half
        self.augment = augment
        self.channels = max(channels, pixels.shape[1])
        self.side = (pixels.shape[2], pixels.shape[3]) if size is None else (size, size)
        self.shape = (self.channels, *self.side)
        self.levels = to_float(torch.arange(256, dtype=torch.uint8), half).to(pixels.device)

    @property
    def is_exact_on_gpu(self) -> bool:
        """True if the augmentation moves pixels without arithmetic, so that a GPU returns the same bits."""
        changes = self.augment
        return changes.crop == "center" and not (changes.rotate or changes.zoom or changes.shift)

    def to(self, device: torch.device) -> ArrayImages:
        """Return the same images on a device, where :meth:`load` then returns its samples.

        Augmentation draws the same numbers on every device. Flips have the same bits; crops and affine
        transforms are equal up to rounding.
        """
        placed = copy.copy(self)
        placed.pixels, placed.levels = self.pixels.to(device), self.levels.to(device)
        return placed

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """Load images in [-1, 1]; see :class:`~driftgen.data.images.RealData`."""
        pixels = self.pixels[indices.to(self.pixels.device, non_blocking=True)]
        # A table, because division has other rounding on a GPU than on the CPU.
        images = self.levels.index_select(0, pixels.flatten().int()).view(pixels.shape)
        if self.augment.crop == "random-resized":
            boxes = random_boxes(
                self.pixels.shape[2], self.pixels.shape[3], self.augment, seed, first, len(indices)
            )
            images = crop_resize(images, boxes, self.side).clamp(-1, 1)
        images = flip_and_warp(images, self.augment, seed, first)
        return images.expand(-1, self.channels, -1, -1)

    def close(self) -> None:
        """Do nothing: there are no background workers."""


def to_float(pixels: Tensor, half: float = 127.5) -> Tensor:
    """Convert uint8 to float32 in [-1, 1]."""
    return pixels.float().div_(half).sub_(1)


def open_array(path: Path, config: Data) -> ArrayImages:
    """Open the images of an ``.npz`` or ``.npy`` file; see :func:`driftgen.data.images.open_images`."""
    return _prepared(path, *_read_array(path), config)


def from_arrays(images: NDArray[Any], labels: NDArray[Any] | None, config: Data) -> ArrayImages:
    """Prepare images passed from Python like those of a file; without labels they are of one class."""
    where = Path("data")  # named in messages
    count = len(images) if images.ndim else 0
    if labels is None:
        return _prepared(where, images, np.zeros(count, np.int64), ["all"], config)
    return _prepared(where, images, *_classes(where, count, labels, None), config)


def _prepared(
    path: Path, images: NDArray[Any], all_labels: NDArray[np.int64], names: list[str], config: Data
) -> ArrayImages:
    if images.ndim == 0 or len(images) == 0:
        raise InputError(f"{path} holds no images: store at least one", topic="no-images")
    labels, names, chosen = choose(all_labels, names, config)
    pixels = _to_bytes(path, _channels_first(path, images))[chosen]
    if 0 in pixels.shape[2:]:
        raise InputError(
            f"{path}: images have {pixels.shape[2]}x{pixels.shape[3]} pixels, at least 1x1 is needed"
        )
    return in_memory(_fit_channels(path, pixels, config.channels), labels, names, config)


def in_memory(pixels: NDArray[np.uint8], labels: Tensor, names: list[str], config: Data) -> ArrayImages:
    """Wrap uint8 images ``[n, c, h, w]``, resized to ``config.size``."""
    if config.size is not None and config.augment.crop == "center":
        pixels = _resized(pixels, config.size)
    return ArrayImages(
        torch.from_numpy(np.ascontiguousarray(pixels)),
        labels,
        names,
        config.augment,
        channels=config.channels,
        size=config.size,
    )


def _read_array(path: Path) -> tuple[NDArray[Any], NDArray[np.int64], list[str]]:
    names: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None
    with reading(path, "an array"), open_regular(path) as file:
        is_zip = file.read(2) == b"PK"
    if is_zip:
        stored = read_arrays(path, [*IMAGES, *LABELS, "class_names"])
        images = _entry(path, stored, IMAGES)
        labels = next((stored[key] for key in LABELS if key in stored), None)
        names = stored.get("class_names")
    else:
        images = read_array(path)
    if labels is None:
        return images, np.zeros(len(images) if images.ndim else 0, np.int64), [path.stem]
    return images, *_classes(path, len(images) if images.ndim else 0, labels, names)


def _entry(path: Path, stored: dict[str, Any], keys: tuple[str, ...]) -> NDArray[Any]:
    key = next((key for key in keys if key in stored), None)
    if key is None:
        raise InputError(
            f"{path} holds {', '.join(stored) or 'nothing'}: images are expected under {', '.join(keys)}"
        )
    array: NDArray[Any] = stored[key]
    return array


def _classes(
    path: Path, n: int, labels: NDArray[Any], names: NDArray[Any] | None
) -> tuple[NDArray[np.int64], list[str]]:
    """Return integer labels from 0 and the name of each class."""
    if not isinstance(labels, np.ndarray):
        raise InputError(f"{path}: the labels are no array: store one label per image")
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (n,):
        raise InputError(f"{path}: labels have shape {list(labels.shape)}, expected [{n}], one per image")
    if labels.dtype.kind in "US":
        words, indices = np.unique(_text(path, "labels", labels), return_inverse=True)
        return indices.astype(np.int64), words.tolist()
    if labels.dtype.kind not in "iu":
        raise InputError(f"{path}: labels have dtype {labels.dtype}, expected integers from 0, or strings")
    if n and labels.min() < 0:
        raise InputError(f"{path}: a label is {labels.min()}, expected 0, 1, ...")
    count = int(labels.max()) + 1 if n else 0
    if names is None:
        if count > max(100_000, n):
            raise InputError(f"{path}: a label is {count - 1}, expected 0, 1, ... without gaps")
        class_names = [str(c) for c in range(count)]
    else:
        class_names = [str(name) for name in _text(path, "class_names", names).ravel()]
    if len(class_names) < count:
        raise InputError(f"{path}: {len(class_names)} class_names, but a label is {count - 1}")
    missing = np.setdiff1d(np.arange(len(class_names)), labels)
    if n and len(missing):
        raise InputError(
            f"{path}: no image has label {missing[0]} ({class_names[missing[0]]}): number the classes "
            "without gaps"
        )
    return labels.astype(np.int64), class_names


def _text(path: Path, what: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return strings; bytes, as Python 2 and HDF5 store them, are decoded."""
    if array.dtype.kind != "S":
        return array.astype(str)
    try:
        return np.char.decode(array, "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: {what} hold {error.object!r}, which is not UTF-8 text: store them as strings (dtype U)"
        ) from None


def _channels_first(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    if images.ndim == 3:
        return images[:, None]
    if images.ndim == 4 and images.shape[3] in (1, 2, 3, 4):
        return images.transpose(0, 3, 1, 2)
    if images.ndim == 4 and images.shape[1] in (1, 2, 3, 4):
        return images
    raise InputError(
        f"{path}: images have shape {list(images.shape)}, expected [n, h, w], [n, h, w, c] or [n, c, h, w] "
        "with c from 1 to 4"
    )


def _to_bytes(path: Path, images: NDArray[Any]) -> NDArray[np.uint8]:
    """Convert to uint8; :func:`~driftgen.data.images.open_images` documents the accepted ranges."""
    kind = images.dtype.kind
    if kind == "b":
        return images.astype(np.uint8) * np.uint8(255)
    if kind not in "iuf":
        raise InputError(f"{path}: images have dtype {images.dtype}, expected uint8 or floats")
    low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 0.0)
    if kind in "iu":
        if low < 0 or high > 255:
            raise InputError(f"{path}: images hold {low:g} ... {high:g}, expected 0 ... 255 for integers")
        if 0 < high <= 1:
            raise InputError(
                f"{path}: images hold only 0 and 1 as integers: store them as booleans or as floats"
            )
        return images.astype(np.uint8, copy=False)
    if not (low >= -1.001 and high <= 1.001):  # True for NaN as well
        raise InputError(
            f"{path}: images hold {low:g} ... {high:g}, expected 0 ... 1 or -1 ... 1 for floats; store "
            "0 ... 255 as uint8"
        )
    scale, shift = (127.5, 127.5) if low < 0 else (255.0, 0.0)
    out = np.empty(images.shape, np.uint8)
    for part in _slices(len(images)):
        out[part] = np.rint((images[part].astype(np.float32) * scale + shift).clip(0, 255))
    return out


def _fit_channels(path: Path, pixels: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Composite alpha onto white and convert color to gray for one channel. Loading repeats gray to color."""
    if pixels.shape[1] in (2, 4):
        pixels = _apply(pixels, pixels.shape[1] - 1, _composite_on_white)
    if channels == 1 and pixels.shape[1] == 3:
        pixels = _apply(pixels, 1, _to_gray)
    return pixels


def _composite_on_white(images: NDArray[np.float32]) -> NDArray[np.float32]:
    color, alpha = images[:, :-1], images[:, -1:] / np.float32(255)
    out: NDArray[np.float32] = color * alpha + 255 * (1 - alpha)
    return out


def _to_gray(images: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.asarray([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as in Pillow
    out: NDArray[np.float32] = np.einsum("nchw,c->nhw", images, weights)[:, None]
    return out


def _apply(pixels: NDArray[np.uint8], channels: int, function: Any) -> NDArray[np.uint8]:
    out = np.empty((len(pixels), channels, *pixels.shape[2:]), np.uint8)
    for part in _slices(len(pixels)):
        out[part] = np.rint(function(pixels[part].astype(np.float32)))
    return out


def _resized(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Apply :func:`~driftgen.data.decode.center_crop` to all images."""
    n, channels, height, width = pixels.shape
    if (height, width) == (size, size):
        return pixels
    check_fits(
        f"{n:,} images of data.size={size}",
        n * channels * size * size,
        torch.device("cpu"),
        "lower data.size",
    )
    out = np.empty((n, channels, size, size), np.uint8)
    for i, image in enumerate(pixels):
        array = np.ascontiguousarray(image[0] if channels == 1 else image.transpose(1, 2, 0))
        cropped = center_crop(Image.fromarray(array), size)
        out[i] = np.asarray(cropped).reshape(size, size, channels).transpose(2, 0, 1)
    return out


def _slices(n: int, step: int = 4096) -> Iterator[slice]:
    """Yield slices that bound the memory of a conversion."""
    return (slice(i, i + step) for i in range(0, n, step))
