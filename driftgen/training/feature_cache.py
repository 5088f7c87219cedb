"""Features of all real samples, computed once and kept on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from driftgen.data.arrays import ArrayImages
from driftgen.data.augment import draw_flips, without_augmentation
from driftgen.data.images import RealData
from driftgen.errors import InputError
from driftgen.training.step_inputs import Features

__all__ = ["CachedRows", "FeatureCache", "choose_images", "open_cache"]

Setting = bool | Literal["auto"]  # auto: on a GPU, if the data allow it and the features fit
ENCODED = 500  # images encoded at a time
LARGEST_SHARE = 0.8  # of the free memory of a GPU


class CacheTooLargeError(InputError):
    """The features do not fit into the memory of the GPU."""


class FeatureCache:
    """φ of every image: row i holds image i, row n + i its mirror image.

    An image needs no further pass through the encoder, so a step may have many positives: looking up a
    feature only copies it. Features must not depend on the other images of a batch.

    Args:
        images: all images, in memory, augmented by flips at most.
        encode: φ, maps images ``[B, C, H, W]`` to features ``[B, V, D]``.
        device: where the features are kept.
        autocast: dtype of the encoder and of the features; None for float32.
    """

    def __init__(
        self,
        images: ArrayImages,
        encode: Callable[[Tensor], Mapping[str, Tensor]],
        device: torch.device,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.tables: Features = {}
        plain = without_augmentation(images)
        n = len(images.labels)
        views = (False, True) if images.augment.flip else (False,)
        for view, mirrored in enumerate(views):
            for chosen in torch.arange(n).split(ENCODED):
                batch = plain.load(chosen, 0).to(device)
                features = _encode(batch.flip(3) if mirrored else batch, encode, autocast)
                if not self.tables:
                    self._allocate(features, n * len(views))
                start = view * n + int(chosen[0])
                for name, value in features.items():
                    self.tables[name][start : start + len(chosen)] = value

    def __str__(self) -> str:
        rows = len(next(iter(self.tables.values())))
        size = sum(table.nbytes for table in self.tables.values())
        return f"features of {rows:,} images cached: {size / 2**30:.1f} GiB"

    def __call__(self, rows: Tensor) -> Features:
        """Return the features of the rows ``[B]``, each ``[B, V, D]``."""
        return {name: table.index_select(0, rows) for name, table in self.tables.items()}

    def _allocate(self, features: Features, rows: int) -> None:
        needed = rows * sum(value[0].nbytes for value in features.values())
        device = next(iter(features.values())).device
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if needed > LARGEST_SHARE * free:
                raise CacheTooLargeError(
                    f"the features of {rows:,} images need {needed / 2**30:.1f} GiB, the GPU has "
                    f"{free / 2**30:.1f} GiB free"
                )
        self.tables = {name: value.new_empty(rows, *value.shape[1:]) for name, value in features.items()}


class CachedRows:
    """Real data that loads rows of a :class:`FeatureCache` instead of images.

    Draws the same flips as the images, so that a run with a cache sees the same real samples as one without.
    """

    decodes = False

    def __init__(self, images: ArrayImages) -> None:
        self.shape, self.labels, self.class_names = images.shape, images.labels, images.class_names
        self.flip = images.augment.flip

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """Return the row of each image, ``[n]``; see :class:`~driftgen.data.images.RealData`."""
        if not self.flip:
            return indices
        return indices + len(self.labels) * draw_flips(seed, first, len(indices))

    def close(self) -> None:
        """Do nothing: there are no background workers."""


def choose_images(
    setting: Setting, data: RealData, device: torch.device, *, queue: bool
) -> ArrayImages | None:
    """Return the data if their features are to be cached, else None. Raises if they must be and cannot."""
    problem = ""
    if queue:
        problem = "set queue.kind=index, queues hold samples and no features"
    elif not isinstance(data, ArrayImages):
        problem = "the images must be in memory, use an .npz file or arrays from Python"
    elif not data.is_exact_on_gpu:
        problem = "data.augment may flip images, but not crop, rotate, zoom or shift them"
    elif setting is True or (setting == "auto" and device.type == "cuda"):
        return data
    if setting is True:
        raise InputError(f"cache_features=true: {problem}")
    return None


def open_cache(
    setting: Setting,
    images: ArrayImages | None,
    encode: Callable[[Tensor], Mapping[str, Tensor]],
    device: torch.device,
    autocast: torch.dtype | None,
    info: Callable[[str], None],
) -> FeatureCache | None:
    """Compute the features of all images, if there are any, and say how much memory they take."""
    if images is None:
        return None
    try:
        cache = FeatureCache(images, encode, device, autocast)
    except CacheTooLargeError as error:
        if setting is True:
            raise InputError(
                f"cache_features=true: {error}: set cache_features=false, or data.augment.flip=false"
            ) from None
        info(f"features are computed at every step: {error}")
        return None
    info(str(cache))
    return cache


@torch.no_grad()
def _encode(
    images: Tensor, encode: Callable[[Tensor], Mapping[str, Tensor]], autocast: torch.dtype | None
) -> Features:
    # The batch has a size of its own: compiling for it would take longer than all passes.
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(images.device.type, autocast, enabled=autocast is not None),
    ):
        return {name: value.to(autocast or value.dtype) for name, value in encode(images).items()}
