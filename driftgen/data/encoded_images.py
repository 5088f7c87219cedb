"""Encoded images of any container (files, shards, tables), which worker processes decode when drawn."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.data import decode
from driftgen.data.arrays import to_float
from driftgen.data.augment import crop_uniforms, flip_and_warp
from driftgen.data.classes import choose
from driftgen.data.decode_workers import DecodeWorkers
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["EncodedImages", "Listing", "UnreadableImagesError", "required_size"]

TOLERATED = 0.01  # fraction of unreadable images


class Listing(NamedTuple):
    """Encoded images of a dataset, with their labels.

    Attributes:
        where: name of the dataset, for messages.
        images: each as :func:`driftgen.data.decode.decode` takes it.
        names: name of each image, for messages.
        labels: class of each image.
        class_names: name of each class.
        notes: one-line remarks on how the dataset was read.
        unreadable: error message of each image whose header is damaged; None if no header was read yet.
        has_files: the images have file names, which identify them.
    """

    where: str
    images: Sequence[Any]
    names: Sequence[str]
    labels: NDArray[np.int64]
    class_names: list[str]
    notes: Sequence[str] = ()
    unreadable: Mapping[int, str] | None = None
    has_files: bool = True


class UnreadableImagesError(InputError):
    """Too many images of a dataset cannot be read.

    Attributes:
        unreadable: name and error message of each.
        counts: readable images per class by name, of a dataset that is being opened.
    """

    def __init__(self, message: str, unreadable: Sequence[str], counts: Mapping[str, int]) -> None:
        super().__init__(message, topic="unreadable-images")
        self.unreadable, self.counts = list(unreadable), dict(counts)


class EncodedImages:
    """Images that are decoded whenever they are drawn.

    An unreadable image is listed in ``unreadable`` and always replaced by the same other image of its class.
    At least two unreadable images that are more than 1% of all are an error. Opening the dataset checks the
    header of every image; decoding finds damage beyond the header.

    Args:
        listing: the encoded images.
        config: ``size`` is required. ``workers`` processes decode, or the current process if 0.

    Attributes:
        unreadable: name and error message of each unreadable image that was found so far.
        notes: one-line remarks on how the dataset was read.
        paths: name of each image; None if images have no file names.
    """

    decodes = True

    def __init__(self, listing: Listing, config: Data) -> None:
        self.augment, self.channels, self.size = config.augment, config.channels, required_size(config)
        self.shape: tuple[int, int, int] = (self.channels, self.size, self.size)
        self.unreadable: list[str] = []
        self.notes = list(listing.notes)
        self._lock = threading.Lock()
        self._total = len(listing.images)
        self._workers = DecodeWorkers(config.workers) if config.workers else None
        labels, names = listing.labels, listing.class_names
        try:
            readable = self._check_headers(listing)
            counts = np.bincount(labels[readable], minlength=len(names))
            self._check_unreadable(dict(zip(names, counts.tolist(), strict=True)))
            if not counts.all():
                raise UnreadableImagesError(
                    f"none of the images of class {names[int(counts.argmin())]} in {listing.where} can be "
                    f"read: repair or remove them, {self.unreadable[0]}",
                    self.unreadable,
                    dict(zip(names, counts.tolist(), strict=True)),
                )
            self.labels, self.class_names, chosen = choose(labels[readable], names, config)
        except BaseException:
            self.close()
            raise
        self._images, self._names = listing.images, listing.names
        self._positions = np.flatnonzero(readable)[chosen]
        self.paths = [self._names[i] for i in self._positions] if listing.has_files else None
        self._replacements: dict[int, int] = {}  # index of an unreadable image -> index of its replacement

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """Load images in [-1, 1]; see :class:`~driftgen.data.images.RealData`."""
        random = self.augment.crop == "random-resized"
        table = crop_uniforms(seed, first, len(indices)).tolist() if random else None
        out = np.empty((len(indices), self.size, self.size, self.channels), np.uint8)
        sources = [self._replacements.get(i, i) for i in indices.tolist()]
        pending = list(range(len(sources)))
        while pending:
            jobs = [self._job(sources[i], table[i] if table else None) for i in pending]
            names = [self._name(sources[i]) for i in pending]
            failed = self._decode(jobs, [out[i] for i in pending], names)
            pending = [pending[i] for i in failed]
            for i, reason in zip(pending, failed.values(), strict=True):
                sources[i] = self._replace(sources[i], reason)
        images = to_float(torch.from_numpy(out)).permute(0, 3, 1, 2).contiguous()
        return flip_and_warp(images, self.augment, seed, first)

    def close(self) -> None:
        """Stop the worker processes."""
        if self._workers:
            self._workers.close()

    def _name(self, index: int) -> str:
        return self._names[int(self._positions[index])]

    def _job(self, index: int, uniforms: list[float] | None) -> list[Any]:
        image = self._images[int(self._positions[index])]
        return [image, self.size, self.channels, uniforms, self.augment.crop_scale]

    def _decode(
        self, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]], names: Sequence[str]
    ) -> dict[int, str]:
        """Run the jobs; return the error message of each job that failed."""
        if self._workers:
            return self._workers.run(jobs, out, names)
        failed = {}
        for i, job in enumerate(jobs):
            try:
                if len(job) == 1:
                    decode.readable(*job)
                else:
                    out[i][...] = decode.decode(*job)
            except Exception as error:  # Pillow raises many types for damaged files
                failed[i] = decode.reason(error)
        return failed

    def _check_headers(self, listing: Listing) -> NDArray[np.bool_]:
        readable = np.ones(len(listing.images), bool)
        failed = listing.unreadable
        if failed is None:
            failed = self._decode([[image] for image in listing.images], (), listing.names)
        for i, reason in failed.items():
            readable[i] = False
            self.unreadable.append(f"{listing.names[i]} ({reason})")
        return readable

    def _replace(self, index: int, reason: str) -> int:
        """Return the next readable image of the class in the order of the dataset, wrapping at the end."""
        with self._lock:
            if index not in self._replacements:
                self.unreadable.append(f"{self._name(index)} ({reason})")
                self._check_unreadable()
                same_class = (self.labels == self.labels[index]).nonzero()[:, 0]
                position = int((same_class == index).nonzero()[0])
                others = torch.cat([same_class[position + 1 :], same_class[:position]]).tolist()
                replacement = next((i for i in others if i not in self._replacements), None)
                if replacement is None:
                    name = self.class_names[int(self.labels[index])]
                    raise InputError(f"none of the images of class {name} can be read: {self.unreadable[-1]}")
                self._replacements[index] = replacement
                for unreadable, other in self._replacements.items():
                    if other == index:
                        self._replacements[unreadable] = replacement
            return self._replacements[index]

    def _check_unreadable(self, counts: Mapping[str, int] = MappingProxyType({})) -> None:
        count = len(self.unreadable)
        if count > max(1, TOLERATED * self._total):
            more = f" and {count - 5} more" if count > 5 else ""
            raise UnreadableImagesError(
                f"{count} of {self._total} images cannot be read, more than 1%; repair or remove them: "
                f"{'; '.join(self.unreadable[:5])}{more}",
                self.unreadable,
                counts,
            )


def required_size(config: Data) -> int:
    """Return the side of the images, which have no common size of their own."""
    if config.size is None:
        raise InputError(
            "data.size is missing: set the side of the images in pixels, such as 64 "
            "(driftgen eval: --size 64)"
        )
    return config.size
