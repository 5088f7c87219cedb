"""Open what ``driftgen eval`` names: models or images, data or stored statistics, an encoder."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from driftgen.data.config import Data
from driftgen.data.locate import is_shard
from driftgen.errors import InputError
from driftgen.evaluation.encoders import Encoder, load_encoder
from driftgen.evaluation.image_sources import ImageSource, RealImages
from driftgen.evaluation.real_images import DIGITS, DIGITS_HELDOUT, Shape, open_in_shape
from driftgen.evaluation.reference import Reference, compute_reference, load_reference
from driftgen.interop.packaged import find_packaged
from driftgen.pipeline import DriftPipeline
from driftgen.support.distributed import Distributed
from driftgen.support.user_paths import expand_user

__all__ = ["DATA", "Track", "choose_encoder", "is_images", "open_reference", "parse_guidance"]

# Shows progress: (title, total images, metric) -> context that yields a function of (images, value).
Track = Callable[[str, int, str], AbstractContextManager[Callable[[int, float], None]]]
INCEPTION_VARIABLE = "DRIFTGEN_INCEPTION"
ARRAYS = (".npz", ".npy")
MODEL_FILES = ("config.json", "config.yaml", "metadata.json")
REFERENCE = "reference.safetensors"
DATA = "data:"  # before the name of images where a packaged model has that name too


def choose_encoder(
    name: str | None, device: torch.device, *, force: bool = False, fast: bool = False
) -> Encoder:
    """Load the named encoder; by default the FID Inception that ``DRIFTGEN_INCEPTION`` names."""
    chosen = name or os.environ.get(INCEPTION_VARIABLE)
    if not chosen:
        raise InputError(
            "give --encoder: the file of the FID Inception (for FID), a pretraining run or pixels (for a "
            f"Fréchet distance named after it); or set {INCEPTION_VARIABLE} to the Inception file",
            topic="fid-inception",
        )
    return load_encoder(chosen, device, force=force, fast=fast)


def is_images(source: str) -> bool:
    """Return True if a source is images (an array, a folder, shards), and no model.

    The name of a packaged model is the model; :data:`DATA` before a name makes it images.
    """
    if source.startswith(DATA):
        return True
    place = expand_user(source)
    if find_packaged(source) is not None and not place.exists():
        return False
    if place.suffix.lower() in ARRAYS or source in (DIGITS, DIGITS_HELDOUT) or is_shard(source):
        return True
    return place.is_dir() and not any((place / name).exists() for name in MODEL_FILES)


def _open_images_like(source: str | Data, shape: Shape) -> RealImages:
    """Open images in this shape."""
    name = source if isinstance(source, str) else source.path or source.kind
    return RealImages(open_in_shape(source, shape, resize=None), Path(name).name)


def open_reference(
    data: str | Data,
    encoder: Encoder,
    processes: Distributed,
    *,
    shape: Shape,
    out: Path | None,
    track: Track,
    force: bool = False,
) -> Reference:
    """Load stored statistics, or compute those of images and store them as ``reference.safetensors``.

    Args:
        data: a ``.safetensors`` file of ``driftgen eval stats``, images, or the data section of a run.
        encoder: that the statistics must have.
        processes: that share the work.
        shape: of the images to compare with.
        out: folder of the evaluation; statistics found there are used again.
        track: shows progress.
        force: accept statistics of another encoder.
    """
    if isinstance(data, str) and data.endswith(".safetensors"):
        reference = load_reference(data, encoder.device if encoder.device.type != "mps" else "cpu")
        reference.check(encoder, force=force)
        return reference
    images = _open_images_like(data, shape)
    try:
        stored = None if out is None else _stored(out / REFERENCE, images, encoder)
        if stored is not None:
            return stored
        partial = None if out is None else out / "partial-reference"
        with track(f"{encoder.name} of {images.about['data']}", images.count, "s") as on_block:
            reference = compute_reference(images, encoder, processes, partial=partial, on_block=on_block)
    finally:
        images.close()
    if out is not None and processes.is_main:
        reference.save(out / REFERENCE)
        for file in out.glob("partial-reference-*"):
            file.unlink()
    return reference


def _stored(path: Path, images: ImageSource, encoder: Encoder) -> Reference | None:
    if not path.is_file():
        return None
    try:
        reference = load_reference(path, encoder.device if encoder.device.type != "mps" else "cpu")
    except InputError:
        return None  # computed again
    same = {k: v for k, v in reference.about.items() if k != "checksum"} == images.about
    return reference if same and dict(reference.encoder) == dict(encoder.identity) else None


def image_shape(pipe: DriftPipeline) -> Shape:
    """Return ``(C, H, W)`` of the images of a model, by sampling one."""
    image: Any = pipe(pipe.labels()[:1], seed=0, output="numpy")
    height, width, channels = image.shape[1:]
    return channels, height, width


def parse_guidance(text: str | None) -> list[float]:
    """Parse ``1.0,1.3,1.6``."""
    try:
        return [] if text is None else [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"guidance={text}: give numbers separated by commas, such as 1.0,1.5,2.0") from None
