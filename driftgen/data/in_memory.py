"""Data passed from Python: arrays of images, and PyTorch datasets of (image, label)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.data.arrays import from_arrays, to_float
from driftgen.data.augment import crop_resize, flip_and_warp, random_boxes
from driftgen.data.classes import choose
from driftgen.data.config import InMemory
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data
    from driftgen.data.images import RealData

__all__ = ["DatasetImages", "open_memory"]

PROBED = 64  # items of a dataset that decide the range of its floats


def open_memory(data: Any, config: Data) -> tuple[RealData, Data]:
    """Open data passed from Python; return it with the section of the configuration that describes it.

    Args:
        data: images, or a pair (images, labels), as NumPy arrays or tensors; or a map-style dataset of
            (image, label). Arrays are as in :func:`driftgen.data.images.open_images`. Images of a dataset are
            PIL images, or arrays ``[C, H, W]`` of uint8 or of floats in [0, 1] or [-1, 1]. Without labels,
            all images are of one class.
        config: the rest of the section, such as the augmentation.
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
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | list):
        config = config.model_copy(update={"kind": "memory", "path": None})
        opened = DatasetImages(data, config)
        # Items of a dataset may be augmented: only the labels identify it.
        record = InMemory(count=len(data), shape=opened.shape, checksum=_checksum(opened.labels.numpy()))
    else:
        raise InputError(
            f"data is a {type(data).__name__}: pass arrays (images, labels), a sized dataset, or a path"
        )
    return opened, config.model_copy(update={"memory": record})


class DatasetImages:
    """A map-style dataset of (image, label) as real data.

    Labels come from the dataset's ``targets`` or ``labels`` if it has them, otherwise from one pass over all
    items; class names come from its ``classes``. Random transforms of the dataset draw from the global RNG,
    so a resumed run does not repeat them exactly.
    """

    decodes = False  # items are read in the calling thread: datasets need not be thread-safe

    def __init__(self, dataset: Any, config: Data) -> None:
        if len(dataset) == 0:
            raise InputError("data: the dataset is empty")
        self.dataset, self.augment = dataset, config.augment
        probed = [self._item(i) for i in range(min(PROBED, len(dataset)))]
        self.signed = any(float(image.min()) < 0 for image in probed)
        self.stored = tuple(probed[0].shape)
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
        labels = self._labels()
        count = int(labels.max()) + 1
        missing = set(range(count)) - set(labels.tolist())
        if missing:
            raise InputError(f"data: no image has label {min(missing)}: number the classes without gaps")
        names = getattr(dataset, "classes", None)
        if names is None or len(names) != count:
            names = range(count)
        self.labels, self.class_names, self.indices = choose(labels, [str(n) for n in names], config)

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """See :class:`~driftgen.data.images.RealData`."""
        items = [self._item(int(self.indices[i])) for i in indices]
        for i, image in zip(indices.tolist(), items, strict=True):
            if tuple(image.shape) != self.stored:
                raise InputError(
                    f"data: image {i} of the dataset has shape {list(image.shape)}, the first has "
                    f"{list(self.stored)}: resize them in the dataset"
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

    def _item(self, i: int) -> Tensor:
        """Return image i as floats; integers are mapped to [0, 1]."""
        item = self.dataset[i]
        image = item[0] if isinstance(item, tuple | list) else item
        if not isinstance(image, Tensor):
            array = np.asarray(image)
            if not isinstance(image, np.ndarray):  # a PIL image: channels last, or none
                array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
            image = torch.from_numpy(np.array(array))  # a copy: PIL arrays are read-only
        return image.float() if image.is_floating_point() else to_float(image).add(1).div(2)

    def _labels(self) -> NDArray[np.int64]:
        for name in ("targets", "labels"):
            known = getattr(self.dataset, name, None)
            if known is not None and not callable(known) and len(known) == len(self.dataset):
                return np.asarray(known).astype(np.int64)
        items = (self.dataset[i] for i in range(len(self.dataset)))
        return np.asarray([int(item[1]) if isinstance(item, tuple | list) else 0 for item in items], np.int64)


def _numpy(array: Any) -> NDArray[Any]:
    if isinstance(array, Tensor):
        array = array.detach().cpu()
        array = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    result: NDArray[Any] = np.asarray(array)
    return result


def _checksum(*arrays: NDArray[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
