"""Images of a response: encoded as files, in JSON or alone."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.support.images import to_pil

__all__ = ["MEDIA_TYPES", "encode", "encode_all", "preferred_format", "usable_formats"]

MEDIA_TYPES = {
    "png": "image/png",
    "jpeg": "image/jpeg",
    "webp": "image/webp",
    "npy": "application/x-npy",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "png": {"compress_level": 1},  # speed counts; level 6 saves a tenth of the bytes
    "jpeg": {"quality": 95},
    "webp": {"quality": 95},
}


def preferred_format(accept: str) -> str | None:
    """Return the format of a single image that an Accept header asks for first; None for JSON."""
    for part in accept.lower().split(","):
        media = part.partition(";")[0].strip()
        if media in ("application/json", "*/*", "application/*"):
            return None
        for name, known in MEDIA_TYPES.items():
            if media == known:
                return name
    return None


def usable_formats(shape: Sequence[int]) -> list[str]:
    """Return the formats that this Pillow can write images ``[H, W, C]`` in, ready to be used."""
    usable = []
    for name in MEDIA_TYPES:
        try:
            encode(np.zeros(tuple(shape), np.uint8), name)
        except (KeyError, OSError):  # a Pillow that was built without it
            continue
        usable.append(name)
    return usable


def encode(pixels: NDArray[np.uint8], file_format: str) -> bytes:
    """Return one image ``[H, W, C]``, or for ``npy`` any array, as a file."""
    file = io.BytesIO()
    if file_format == "npy":
        np.save(file, pixels, allow_pickle=False)
    else:
        to_pil(pixels[None])[0].save(file, file_format.upper(), **OPTIONS[file_format])
    return file.getvalue()


def encode_all(images: NDArray[np.uint8], file_format: str) -> list[str]:
    """Return each image as a file in base64."""
    return [base64.b64encode(encode(image, file_format)).decode() for image in images]
