"""Real images: the packaged digits, arrays in memory, folders of files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.data.arrays import ArrayImages, in_memory, open_array, to_float
from driftgen.data.classes import choose
from driftgen.data.folder import FolderImages
from driftgen.errors import InputError, unknown_name

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["RealData", "digits", "open_images"]

DIGIT_LEVELS = 8  # their bytes are 0 ... 16


class RealData(Protocol):
    """Real samples by number.

    ``load(indices, seed, first)`` gives ``[len(indices), *shape]`` in float32, images in [-1, 1]. How sample
    i of a call is augmented depends on ``seed`` and ``first + i`` only, so a draw may be loaded in parts.
    ``close()`` ends what runs in the background.
    """

    shape: tuple[int, int, int]
    labels: Tensor
    class_names: list[str]

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor: ...

    def close(self) -> None: ...


def open_images(config: Data) -> RealData:
    """The images that a configuration names.

    - ``digits``: the training part of the packaged digits; always gray.
    - A folder: class sub-folders, or images of one class, see :class:`~driftgen.data.folder.FolderImages`.
    - ``.npz``: images under ``images``, ``x``, ``x_train`` or ``arr_0``; labels, if any, under ``labels``,
      ``y`` or ``y_train``, as integers 0, 1, ... or as words; names of the classes, if any, under
      ``class_names``. ``.npy``: images alone, one class. Nothing is unpickled.

    Arrays are ``[n, h, w]``, ``[n, h, w, c]`` or ``[n, c, h, w]`` (the last axis is the channels if it has 1
    to 4 entries), of 0 ... 255 if they are integers, of 0 and 1 if Boolean, otherwise of 0 ... 1, or of
    -1 ... 1 if any number is negative. They are kept as bytes. Channels are made to fit ``channels``, what is
    transparent becomes white. ``limit`` takes the first images of each class, as evenly as it goes.
    """
    if config.kind == "latents":
        raise InputError("data.kind=latents holds no images: open the cache of driftgen encode instead")
    if config.kind == "digits":
        return _open_digits(config)
    if config.path is None:
        raise InputError("data.path is missing: set it to a folder of images, an .npz or an .npy file")
    path = Path(config.path).expanduser()
    if path.is_dir():
        return FolderImages(path, config)
    if not path.exists():
        raise InputError(f"data.path={config.path}: there is no such file or folder")
    if path.suffix.lower() not in (".npz", ".npy"):
        raise InputError(f"data.path={config.path} is a file: expected a folder of images, .npz or .npy")
    return open_array(path, config)


def digits(split: Literal["train", "heldout", "all"] = "train") -> tuple[Tensor, Tensor]:
    """The packaged digits: images ``[n, 1, 8, 8]`` in [-1, 1] and labels ``[n]``.

    1,437 to train on and 360 held out, the same share of every digit; no run trains on the held-out ones.
    """
    pixels, labels = _read_digits(split)
    return to_float(torch.from_numpy(pixels), DIGIT_LEVELS), torch.from_numpy(labels)


def _read_digits(split: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    with (
        files("driftgen.data").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as stored,
    ):
        pixels, labels, heldout = stored["images"], stored["labels"].astype(np.int64), stored["heldout"]
    chosen = {"train": ~heldout, "heldout": heldout, "all": np.ones_like(heldout)}
    if split not in chosen:
        raise unknown_name("split", split, chosen)
    return pixels[chosen[split]][:, None], labels[chosen[split]]


def _open_digits(config: Data) -> ArrayImages:
    pixels, numbers = _read_digits("train")
    labels, names, kept = choose(numbers, [str(d) for d in range(10)], config)
    pixels = pixels[kept]
    if config.size in (None, 8):
        return ArrayImages(torch.from_numpy(pixels), labels, names, config.augment, half=DIGIT_LEVELS)
    pixels = np.rint(pixels * (255 / 16)).astype(np.uint8)
    return in_memory(pixels, labels, names, config.model_copy(update={"channels": 1}))
