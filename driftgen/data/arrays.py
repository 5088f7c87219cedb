"""Arrays of images, kept in memory as bytes."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from driftgen.data.augment import change, crop_resize, random_boxes
from driftgen.data.classes import choose
from driftgen.data.decode import center_crop
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Augment, Data

__all__ = ["ArrayImages", "in_memory", "open_array", "to_float"]

IMAGES, LABELS = ("images", "x", "x_train", "arr_0"), ("labels", "y", "y_train")


class ArrayImages:
    """Images in memory as bytes ``[n, c, h, w]``.

    Args:
        pixels: bytes; b stands for b / ``half`` - 1.
        labels: class of each.
        class_names: name of each class.
        augment: what is done to an image each time it is loaded.
        channels: 3 shows gray images as colour ones.
        size: sides of a random resized crop; None: those of ``pixels``.
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

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """See :class:`~driftgen.data.images.RealData`."""
        images = to_float(self.pixels[indices], self.half)
        if self.augment.crop == "random-resized":
            boxes = random_boxes(
                self.pixels.shape[2], self.pixels.shape[3], self.augment, seed, first, len(indices)
            )
            images = crop_resize(images, boxes, self.side).clamp(-1, 1)
        images = change(images, self.augment, seed, first)
        return images.expand(-1, self.channels, -1, -1)

    def close(self) -> None:
        """Nothing runs."""


def to_float(pixels: Tensor, half: float = 127.5) -> Tensor:
    """Bytes as numbers in [-1, 1]."""
    return pixels.float().div_(half).sub_(1)


def open_array(path: Path, config: Data) -> ArrayImages:
    """The images of an ``.npz`` or ``.npy`` file, see :func:`driftgen.data.images.open_images`."""
    images, numbers, names = _read_array(path)
    if len(images) == 0:
        raise InputError(f"{path} holds no images")
    labels, names, kept = choose(numbers, names, config)
    pixels = _to_bytes(path, _channels_first(path, images))[kept]
    return in_memory(_fit_channels(path, pixels, config.channels), labels, names, config)


def in_memory(pixels: NDArray[np.uint8], labels: Tensor, names: list[str], config: Data) -> ArrayImages:
    """Bytes ``[n, c, h, w]`` as data, brought to the size that is asked for."""
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
    try:
        stored = np.load(path, allow_pickle=False)
        if isinstance(stored, np.ndarray):
            images = stored
        else:
            with stored:
                images = _entry(path, stored, IMAGES)
                labels = next((stored[key] for key in LABELS if key in stored), None)
                names = stored.get("class_names")
    except InputError:
        raise
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{path} cannot be read as an array: {reason}") from None
    if labels is None:
        return images, np.zeros(len(images) if images.ndim else 0, np.int64), [path.stem]
    return images, *_classes(path, len(images) if images.ndim else 0, labels, names)


def _entry(path: Path, stored: Any, keys: tuple[str, ...]) -> NDArray[Any]:
    found = next((key for key in keys if key in stored), None)
    if found is None:
        raise InputError(
            f"{path} holds {', '.join(stored.files) or 'nothing'}: images are expected under "
            f"{', '.join(keys)}"
        )
    array: NDArray[Any] = stored[found]
    return array


def _classes(
    path: Path, n: int, labels: NDArray[Any], names: NDArray[Any] | None
) -> tuple[NDArray[np.int64], list[str]]:
    """Labels as integers from 0, and the name of each class."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.shape != (n,):
        raise InputError(f"{path}: labels have shape {list(labels.shape)}, expected [{n}], one per image")
    if labels.dtype.kind in "US":
        words, numbers = np.unique(labels.astype(str), return_inverse=True)
        return numbers.astype(np.int64), words.tolist()
    if labels.dtype.kind not in "iu":
        raise InputError(f"{path}: labels are of type {labels.dtype}, expected integers from 0, or words")
    if n and labels.min() < 0:
        raise InputError(f"{path}: a label is {labels.min()}, expected 0, 1, ...")
    count = int(labels.max()) + 1 if n else 0
    if names is None:
        if count > max(100_000, n):
            raise InputError(f"{path}: a label is {count - 1}, expected 0, 1, ... without gaps")
        words_list = [str(c) for c in range(count)]
    else:
        words_list = [str(word) for word in names.astype(str).ravel()]
    if len(words_list) < count:
        raise InputError(f"{path}: {len(words_list)} class_names, but a label is {count - 1}")
    missing = np.setdiff1d(np.arange(len(words_list)), labels)
    if n and len(missing):
        raise InputError(
            f"{path}: no image has label {missing[0]} ({words_list[missing[0]]}): number the classes "
            "without gaps"
        )
    return labels.astype(np.int64), words_list


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
    """Numbers as bytes; :func:`~driftgen.data.images.open_images` says how their meaning is found."""
    kind = images.dtype.kind
    if kind == "b":
        return images.astype(np.uint8) * np.uint8(255)
    if kind not in "iuf":
        raise InputError(f"{path}: images are of type {images.dtype}, expected bytes or floats")
    low, high = (float(images.min()), float(images.max())) if images.size else (0.0, 0.0)
    if kind in "iu":
        if low < 0 or high > 255:
            raise InputError(f"{path}: images hold {low:g} ... {high:g}, expected 0 ... 255 for integers")
        if 0 < high <= 1:
            raise InputError(
                f"{path}: images hold only 0 and 1 as integers: store them as Booleans or as floats"
            )
        return images.astype(np.uint8, copy=False)
    if not (low >= -1.001 and high <= 1.001):  # NaN fails, too
        raise InputError(
            f"{path}: images hold {low:g} ... {high:g}, expected 0 ... 1 or -1 ... 1 for floats; store "
            "0 ... 255 as bytes"
        )
    scale, shift = (127.5, 127.5) if low < 0 else (255.0, 0.0)
    out = np.empty(images.shape, np.uint8)
    for part in _slices(len(images)):
        out[part] = np.rint((images[part].astype(np.float32) * scale + shift).clip(0, 255))
    return out


def _fit_channels(path: Path, pixels: NDArray[np.uint8], channels: int) -> NDArray[np.uint8]:
    """Transparency onto white, then colour to gray if asked for; gray to colour waits until loading."""
    if pixels.shape[1] in (2, 4):
        pixels = _mapped(pixels, pixels.shape[1] - 1, _onto_white)
    if channels == 1 and pixels.shape[1] == 3:
        pixels = _mapped(pixels, 1, _to_gray)
    return pixels


def _onto_white(some: NDArray[np.float32]) -> NDArray[np.float32]:
    colour, share = some[:, :-1], some[:, -1:] / np.float32(255)
    out: NDArray[np.float32] = colour * share + 255 * (1 - share)
    return out


def _to_gray(some: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.asarray([0.299, 0.587, 0.114], np.float32)  # ITU-R 601, as Pillow
    out: NDArray[np.float32] = np.einsum("nchw,c->nhw", some, weights)[:, None]
    return out


def _mapped(pixels: NDArray[np.uint8], channels: int, function: Any) -> NDArray[np.uint8]:
    out = np.empty((len(pixels), channels, *pixels.shape[2:]), np.uint8)
    for part in _slices(len(pixels)):
        out[part] = np.rint(function(pixels[part].astype(np.float32)))
    return out


def _resized(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The centre crop of :func:`~driftgen.data.decode.center_crop`, once and for all."""
    n, channels, height, width = pixels.shape
    if (height, width) == (size, size):
        return pixels
    out = np.empty((n, channels, size, size), np.uint8)
    for i, image in enumerate(pixels):
        shown = Image.fromarray(np.ascontiguousarray(image[0] if channels == 1 else image.transpose(1, 2, 0)))
        out[i] = np.asarray(center_crop(shown, size)).reshape(size, size, channels).transpose(2, 0, 1)
    return out


def _slices(n: int, step: int = 4096) -> Iterator[slice]:
    """Parts that keep the memory of a conversion small."""
    return (slice(i, i + step) for i in range(0, n, step))
