"""Real images to compare a model with: opened by name, in the shape of the model's images."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from driftgen.data.arrays import ArrayImages, in_memory
from driftgen.data.config import Augment, Data
from driftgen.data.images import RealData, digits, open_images
from driftgen.data.locate import SOURCES, is_shard
from driftgen.errors import InputError
from driftgen.support.images import rounded_bytes
from driftgen.support.user_paths import expand_user
from driftgen.support.yaml_files import read_mapping

__all__ = ["DIGITS", "DIGITS_HELDOUT", "Shape", "load_bytes", "open_in_shape", "run_data"]

DIGITS, DIGITS_HELDOUT = "digits", "digits-heldout"
Shape = tuple[int, int, int]


def open_in_shape(source: str | Data, shape: Shape, *, resize: bool | None = False) -> RealData:
    """Open real images in the shape of a model's images, without augmentation.

    Args:
        source: ``digits`` or ``digits-heldout``, the two parts of the packaged digits; a path of images as in
            :func:`driftgen.data.images.open_images`; or the data section of a run.
        shape: channels, height and width. Encoded images are center-cropped to it, and gray images are
            repeated to three channels, both as in training. Arrays of another shape are an error.
        resize: center-crop and resize arrays and convert color to gray, instead of the error. None does not
            offer it in the error.
    """
    if isinstance(source, Data):
        # Size and channels are those of the run.
        config, name = source.model_copy(update={"augment": Augment()}), source.path or source.kind
    else:
        config, name = _config(source, shape, bool(resize)), source
    opened = _open_heldout_digits(config) if name == DIGITS_HELDOUT else open_images(config)
    found = opened.shape
    if isinstance(opened, ArrayImages):
        found = (opened.pixels.shape[1], *opened.side)
        if found[0] in (1, shape[0]):  # else its colors would be lost
            opened.channels, opened.shape = shape[0], (shape[0], *opened.side)
    if opened.shape != shape:
        opened.close()
        hint = ", or add --resize" if resize is False and not isinstance(source, Data) else ""
        raise InputError(
            f"the model generates {_words(shape)}, {name} holds {_words(found)}: give the data that the "
            f"model was trained on{hint}"
        )
    return opened


def run_data(model: str) -> Data | None:
    """Return the data section of a training run; None if ``model`` is not the folder of a run."""
    path = Path(model) / "config.yaml"
    if model.startswith("hf://") or not path.is_file():
        return None
    try:
        section = Data.model_validate(read_mapping(path)["data"])
    except (ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path} holds no readable data section ({reason}): name the data") from None
    return None if section.kind in ("latents", "memory") else section


def load_bytes(data: RealData, indices: Tensor) -> Tensor:
    """Load images as uint8 ``[len(indices), C, H, W]``."""
    return rounded_bytes(data.load(indices, seed=0))


def _config(source: str, shape: Shape, resize: bool) -> Data:
    if source in (DIGITS, DIGITS_HELDOUT):
        folder = False
    else:
        path = expand_user(source)
        if not path.exists() and not is_shard(source):
            raise InputError(f"data {source} does not exist: give {SOURCES}, or {DIGITS}")
        folder = path.is_dir() or is_shard(source)
    named = Data(kind="digits") if source == DIGITS else Data(path=source)
    if not (folder or resize):
        return named
    channels, height, width = shape
    if height != width:
        raise InputError(f"the model generates {_words(shape)}: data can be resized to square images only")
    return named.model_copy(update={"size": height, "channels": 1 if channels == 1 else 3})


def _open_heldout_digits(config: Data) -> ArrayImages:
    images, labels = digits("heldout")
    pixels = rounded_bytes(images).numpy()
    return in_memory(pixels, labels, [str(d) for d in range(10)], config.model_copy(update={"channels": 1}))


def _words(shape: Shape) -> str:
    channels, height, width = shape
    return f"{height}x{width} images of {channels} channel{'s' * (channels > 1)}"
