"""Real images: the packaged digits, arrays, folders of files, tar shards, Hugging Face datasets."""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.data.arrays import ArrayImages, in_memory, open_array, to_float
from driftgen.data.classes import choose
from driftgen.data.encoded_images import required_size
from driftgen.data.folder import open_folder
from driftgen.data.hf_datasets import open_parquet, open_saved
from driftgen.data.locate import SOURCES, locate
from driftgen.data.tar_shards import open_shards
from driftgen.errors import InputError, unknown_name

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["RealData", "digits", "open_images"]

DIGIT_LEVELS = 8  # the value that represents 0: pixels are 0 ... 16


class RealData(Protocol):
    """Real samples by index.

    ``load(indices, seed, first)`` returns ``[len(indices), *shape]`` in float32; images are in [-1, 1]. The
    augmentation of sample i of a call depends only on ``seed`` and ``first + i``, so a draw can be loaded in
    parts. ``close()`` stops background workers.
    """

    shape: tuple[int, int, int]
    labels: Tensor
    class_names: list[str]

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor: ...

    def close(self) -> None: ...


def open_images(config: Data) -> RealData:
    """Open the images that a configuration names.

    - ``digits``: the training part of the packaged digits; always gray.
    - A folder: class subfolders, or images of one class; see :func:`driftgen.data.folder.open_folder`.
    - Tar shards, as a folder, a file or a pattern such as ``shards-{000..009}.tar``; see
      :func:`driftgen.data.tar_shards.open_shards`.
    - A Hugging Face dataset: parquet files, as a folder, a file or a pattern, or a folder that
      ``save_to_disk`` wrote; see :mod:`driftgen.data.hf_datasets`.
    - ``.npz``: images under ``images``, ``x``, ``x_train`` or ``arr_0``; optional labels under ``labels``,
      ``y`` or ``y_train``, as integers 0, 1, ... or as strings; optional class names under ``class_names``.
    - ``.npy``: images only, one class.

    Nothing is unpickled. Arrays are ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]``; the last axis is the
    channels if it has 1 to 4 entries. Values are 0 ... 255 for integers, 0 and 1 for booleans, and 0 ... 1
    for floats, or -1 ... 1 if any is negative. Arrays are held as uint8. Images are converted to
    ``channels``; transparent pixels become white. ``limit`` takes the first images of each class, as evenly
    as possible.
    """
    if config.kind == "latents":
        raise InputError("data.kind=latents holds no images: set data.kind=images and the path of the images")
    if config.kind == "digits":
        return _open_digits(config)
    if config.path is None:
        raise InputError(f"data.path is missing: set it to {SOURCES}")
    place = locate(config.path)
    if place.kind == "array":
        return open_array(place.path, config)
    required_size(config)  # before a large dataset is listed
    if place.kind == "tar":
        return open_shards(place, config)
    if place.kind == "parquet":
        return open_parquet(place, config)
    if place.kind == "saved":
        return open_saved(place, config)
    return open_folder(place.path, config)


def digits(split: Literal["train", "heldout", "all"] = "train") -> tuple[Tensor, Tensor]:
    """Return the packaged digits: images ``[n, 1, 8, 8]`` in [-1, 1] and labels ``[n]``.

    1,437 are for training and 360 held out, stratified by digit. No run trains on the held-out digits.
    """
    pixels, labels = _read_digits(split)
    return to_float(torch.from_numpy(pixels), DIGIT_LEVELS), torch.from_numpy(labels)


def _read_digits(split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with (
        files("driftgen.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        pixels, labels, heldout = stored["images"], stored["labels"].astype(np.int64), stored["heldout"]
    masks = {"train": ~heldout, "heldout": heldout, "all": np.ones_like(heldout)}
    if split not in masks:
        raise unknown_name("split", split, masks)
    return pixels[masks[split]][:, None], labels[masks[split]]


def _open_digits(config: Data) -> ArrayImages:
    pixels, all_labels = _read_digits("train")
    labels, names, chosen = choose(all_labels, [str(d) for d in range(10)], config)
    pixels = pixels[chosen]
    if config.size in (None, 8):
        return ArrayImages(torch.from_numpy(pixels), labels, names, config.augment, half=DIGIT_LEVELS)
    pixels = np.rint(pixels * (255 / 16)).astype(np.uint8)
    return in_memory(pixels, labels, names, config.model_copy(update={"channels": 1}))
