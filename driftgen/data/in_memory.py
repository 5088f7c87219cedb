"""Data passed from Python: arrays of images, PyTorch datasets, Hugging Face datasets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from driftgen.data.arrays import from_arrays, to_float
from driftgen.data.augment import crop_resize, flip_and_warp, random_boxes
from driftgen.data.classes import choose, number_classes
from driftgen.data.config import InMemory
from driftgen.data.decode import center_crop, convert
from driftgen.data.encoded_images import EncodedImages
from driftgen.data.hf_datasets import is_plain_dataset, list_rows, square_size
from driftgen.errors import InputError
from driftgen.support.dense_tensors import check_dense

if TYPE_CHECKING:
    from driftgen.data.config import Data
    from driftgen.data.images import RealData

__all__ = ["DatasetImages", "open_memory"]

PROBED = 64  # items of a dataset that decide the range of its floats and its number of channels
GRAY = ("1", "L", "I", "I;16", "F")  # modes of PIL images
IMAGE_KEYS = ("image", "img", "pixel_values", "images")
LABEL_KEYS = ("label", "labels", "target", "class", "cls")


def open_memory(data: Any, config: Data, default_size: int | None = None) -> tuple[RealData, Data]:
    """Open data passed from Python; return it with the section of the configuration that describes it.

    Args:
        data: images, or a pair (images, labels), as NumPy arrays or tensors; a ``datasets.Dataset``; or a
            map-style dataset of (image, label), of dicts with the keys ``image`` and ``label``, or of images.
            Arrays are as in :func:`driftgen.data.images.open_images`. Images of a dataset are PIL images, or
            arrays ``[C, H, W]`` of uint8 or of floats in [0, 1] or [-1, 1]. Labels are integers 0, 1, ... or
            strings. Without labels, all images are of one class.
        config: the rest of the section, such as the augmentation. Without a ``size``, images keep theirs.
        default_size: side of PIL images if they have different sizes and ``config`` has no ``size``.
    """
    pair = data if isinstance(data, tuple | list) and len(data) == 2 else (data, None)
    if isinstance(pair[0], np.ndarray | Tensor):
        images, labels = _numpy(pair[0]), None if pair[1] is None else _numpy(pair[1])
        channels = 1
        if images.ndim == 4:
            channels = images.shape[3] if images.shape[3] <= 4 else images.shape[1]
        update = {"kind": "memory", "path": None, "channels": 1 if channels < 3 else 3}
        config = config.model_copy(update=update)
        opened: RealData = from_arrays(images, labels, config)
        record = InMemory(
            count=len(images), shape=images.shape[1:], checksum=_checksum(images, opened.labels.numpy())
        )
    elif isinstance(data, Mapping):  # a DatasetDict
        raise InputError(f"data holds the splits {', '.join(map(str, data))}: pass one of them, data[...]")
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | list):
        config = config.model_copy(update={"kind": "memory", "path": None})
        if is_plain_dataset(data):
            opened, config = _open_encoded(data, config, default_size)
        else:
            opened = DatasetImages(data, config, default_size)
            config = config.model_copy(update={"size": config.size or opened.crop})
        # Items of a dataset may be augmented: only the labels identify it.
        record = InMemory(count=len(data), shape=opened.shape, checksum=_checksum(opened.labels.numpy()))
    else:
        raise InputError(
            f"data is a {type(data).__name__}: pass arrays (images, labels), a sized dataset, or a path"
        )
    return opened, config.model_copy(update={"memory": record})


def _open_encoded(data: Any, config: Data, default_size: int | None) -> tuple[RealData, Data]:
    """Open a ``datasets.Dataset``, whose images are decoded by worker processes like files."""
    listing, sizes = list_rows(data, "data", config.conditional)
    size = config.size or square_size(sizes) or default_size
    config = config.model_copy(update={"size": size})
    return EncodedImages(listing, config), config


class DatasetImages:
    """A map-style dataset as real data; see :func:`open_memory`.

    Labels come from the dataset's ``targets`` or ``labels`` if it has them, otherwise from one pass over all
    items; class names come from its ``classes``. Random transforms of the dataset draw from the global RNG,
    so a resumed run does not repeat them exactly. PIL images are center-cropped to the size and converted to
    gray if all of the first ones are gray, otherwise to color.
    """

    decodes = False  # items are read in the calling thread: datasets need not be thread-safe

    def __init__(self, dataset: Any, config: Data, default_size: int | None = None) -> None:
        if len(dataset) == 0:
            raise InputError("data: the dataset is empty")
        self.dataset, self.augment = dataset, config.augment
        probed = [_split_item(dataset[i], i)[0] for i in range(min(PROBED, len(dataset)))]
        pictures = [image for image in probed if isinstance(image, Image.Image)]
        self.channels = 1 if all(image.mode in GRAY for image in pictures) else 3
        # The side that PIL images are cropped to; random crops are taken from the images as they are.
        self.crop = config.size if config.augment.crop == "center" else None
        if self.crop is None and len({image.size for image in pictures}) > 1:
            self.crop = config.size or default_size
        tensors = [self._to_tensor(image) for image in probed]
        self.signed = any(float(image.min()) < 0 for image in tensors)
        self.stored = tuple(tensors[0].shape)
        if len(self.stored) != 3 or self.stored[0] not in (1, 3):
            raise InputError(
                f"data: images of the dataset have shape {list(self.stored)}, expected [1, H, W] or [3, H, W]"
            )
        side = self.stored[1:]
        if config.size is not None and side != (config.size, config.size):
            if config.augment.crop == "center":
                raise InputError(f"data.size={config.size}: resize the images in the dataset, or unset it")
            side = (config.size, config.size)
        self.shape = (self.stored[0], side[0], side[1])
        labels, found = self._labels()
        names = getattr(dataset, "classes", None)
        if names is None or len(names) != len(found):
            names = found
        self.labels, self.class_names, self.indices = choose(labels, [str(n) for n in names], config)

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """See :class:`~driftgen.data.images.RealData`."""
        rows = [int(self.indices[i]) for i in indices]
        items = [self._to_tensor(_split_item(self.dataset[i], i)[0]) for i in rows]
        for i, image in zip(rows, items, strict=True):
            if tuple(image.shape) != self.stored:
                raise InputError(
                    f"data: image {i} of the dataset has shape {list(image.shape)}, the first has "
                    f"{list(self.stored)}: set data.size for PIL images, or resize them in the dataset"
                )
        images = torch.stack(items)
        if not self.signed:
            images = images.mul(2).sub(1)
        low, high = float(images.min()), float(images.max())
        if not (low >= -1.01 and high <= 1.01):  # also refuses NaN
            raise InputError(
                "data: floats of the dataset must lie in [0, 1] or [-1, 1], "
                f"got {low:g} to {high:g} on the scale of [-1, 1]"
            )
        if self.augment.crop == "random-resized":
            height, width = self.stored[1:]
            boxes = random_boxes(height, width, self.augment, seed, first, len(indices))
            images = crop_resize(images, boxes, (self.shape[1], self.shape[2])).clamp(-1, 1)
        return flip_and_warp(images, self.augment, seed, first)

    def close(self) -> None:
        """Do nothing: no process runs in the background."""

    def _to_tensor(self, image: Any) -> Tensor:
        """Return an image as floats; integers are mapped to [0, 1]."""
        if isinstance(image, Image.Image):
            picture = convert(image, self.channels)
            if self.crop is not None:
                picture = center_crop(picture, self.crop)
            array = np.asarray(picture)
            image = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
        if not isinstance(image, Tensor):
            array = np.array(image)  # a copy: PIL arrays are read-only
            if array.dtype.kind not in "biuf" or array.ndim == 0:
                raise InputError(f"data: an image is a {type(image).__name__}, expected an array of numbers")
            try:
                image = torch.from_numpy(array)
            except TypeError:  # PyTorch has no such numbers
                raise InputError(
                    f"data: an image holds {array.dtype} numbers, expected uint8 or float32"
                ) from None
        check_dense("data", image)
        return image.float() if image.is_floating_point() else to_float(image).add(1).div(2)

    def _labels(self) -> tuple[NDArray[np.int64], list[str]]:
        """Return integer labels from 0 and a name for each class."""
        known = None
        for name in ("targets", "labels"):
            known = getattr(self.dataset, name, None)
            if known is not None and not callable(known) and len(known) == len(self.dataset):
                break
            known = None
        if known is not None:
            values = _numpy(known).tolist() if isinstance(known, Tensor | np.ndarray) else list(known)
        else:
            values = [_split_item(self.dataset[i], i)[1] for i in range(len(self.dataset))]
            if all(value is None for value in values):
                return np.zeros(len(values), np.int64), ["all"]
        labels = [_label(value, i) for i, value in enumerate(values)]
        if any(isinstance(label, str) for label in labels):
            return number_classes([str(label) for label in labels])[:2]
        numbers = np.asarray(labels, np.int64)
        gap = np.setdiff1d(np.arange(min(int(numbers.max()) + 1, len(numbers) + 1)), numbers)
        if len(gap):
            raise InputError(f"data: no image has label {gap[0]}: number the classes without gaps")
        return numbers, [str(i) for i in range(int(numbers.max()) + 1)]


def _split_item(item: Any, index: int) -> tuple[Any, Any]:
    """Return the image and the label of an item; None for no label."""
    if isinstance(item, Mapping):
        keys = [next((key for key in known if key in item), None) for known in (IMAGE_KEYS, LABEL_KEYS)]
        if keys[0] is None:
            raise InputError(
                f"data: item {index} of the dataset has the keys {', '.join(map(str, item))}: name the image "
                "image and the label label"
            )
        return item[keys[0]], None if keys[1] is None else item[keys[1]]
    if isinstance(item, tuple | list):
        if not item:
            raise InputError(f"data: item {index} of the dataset is empty, expected an image and its label")
        return item[0], item[1] if len(item) > 1 else None
    return item, None


def _label(value: Any, index: int) -> int | str:
    if isinstance(value, Tensor):
        check_dense("data", value)
    number = value.tolist() if isinstance(value, Tensor | np.generic | np.ndarray) else value
    if isinstance(number, list) and len(number) == 1:
        number = number[0]
    if isinstance(number, str):
        return number
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise InputError(
            f"data: the label of item {index} of the dataset is {str(value)[:40]!r}, expected 0, 1, ... or a "
            "name"
        )
    return number


def _numpy(array: Any) -> NDArray[Any]:
    if isinstance(array, Tensor):
        check_dense("data", array)
        array = array.detach().cpu()
        array = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    result: NDArray[Any] = np.asarray(array)
    return result


def _checksum(*arrays: NDArray[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
