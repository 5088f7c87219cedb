"""Image files to bytes. Run as a program, this file is a worker process.

It knows numpy and Pillow only, not the rest of the package: a worker starts in a fraction of a second and
never holds a copy of torch.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CROP_UNIFORMS", "center_crop", "convert", "crop_boxes", "decode", "readable", "reason"]

TRIES = 10
CROP_UNIFORMS = 2 * TRIES + 2  # uniform numbers that a random resized crop is made from


def decode(
    path: str,
    size: int,
    channels: int,
    uniforms: Sequence[float] | None = None,
    scale: tuple[float, float] = (0.2, 1.0),
) -> NDArray[np.uint8]:
    """The image as ``[size, size, channels]``: centre crop, or the random resized crop of ``uniforms``.

    Turned upright as its EXIF entry says.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # odd metadata is no reason to speak up for each of a million files
        with Image.open(path) as file:
            image = convert(ImageOps.exif_transpose(file), channels)
    if uniforms is None:
        image = center_crop(image, size)
    else:
        left, top, width, height = crop_boxes(*image.size, np.asarray([uniforms]), scale)[0].tolist()
        box = (left, top, left + width, top + height)
        image = image.crop(box).resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(image, dtype=np.uint8).reshape(size, size, channels)


def readable(path: str) -> None:
    """Raises if the file does not begin like an image."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(path) as file:
            file.size  # noqa: B018


def convert(image: Image.Image, channels: int) -> Image.Image:
    """Any mode as gray (``channels`` 1) or colour (3).

    What is transparent becomes white. Values of 16 bits are divided by 257; numbers with a point are taken
    as 0 ... 1, or as 0 ... 255 if some are above 1.
    """
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image, dtype=np.float64))
        top = 1.0 if values.max() <= 1 else 255.0
        image = Image.fromarray((values.clip(0, top) * (255 / top)).round().astype(np.uint8))
    elif image.mode.startswith("I"):
        wide = np.asarray(image).astype(np.float64)
        image = Image.fromarray((wide.clip(0, 65535) / 257).round().astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        if image.mode in ("RGBa", "La"):
            image = image.convert("RGBA" if image.mode == "RGBa" else "LA")
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "L" if channels == 1 else "RGB"
    if image.mode == mode:
        return image
    return (
        image.convert("RGB").convert(mode) if image.mode in ("CMYK", "YCbCr", "HSV") else image.convert(mode)
    )


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's centre crop: halve while twice too large, resize the short side, cut out the middle."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = size / min(image.size)
    width, height = round(image.width * factor), round(image.height * factor)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def crop_boxes(
    width: int, height: int, uniforms: NDArray[np.float64], scale: tuple[float, float]
) -> NDArray[np.int64]:
    """Random resized crops ``[n, 4]`` (left, top, width, height) from ``uniforms [n, CROP_UNIFORMS]``.

    A share of the area within ``scale`` and an aspect ratio of 3/4 ... 4/3, evenly in its logarithm; the
    first of ten tries that fits into the image, or else the largest middle part of an allowed ratio.
    """
    low, high = math.log(3 / 4), math.log(4 / 3)
    area = width * height * (scale[0] + (scale[1] - scale[0]) * uniforms[:, :TRIES])
    ratio = np.exp(low + (high - low) * uniforms[:, TRIES : 2 * TRIES])
    w, h = (np.maximum(1, np.rint(np.sqrt(a))) for a in (area * ratio, area / ratio))
    fits = (w <= width) & (h <= height)
    which = np.arange(len(uniforms)), fits.argmax(axis=1)
    good = fits[which]
    fallback = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    w, h = (np.where(good, side[which], other) for side, other in zip((w, h), fallback, strict=True))
    room = np.stack([width - w, height - h], axis=1)
    corner = np.where(good[:, None], np.floor(uniforms[:, -2:] * (room + 1)), room // 2)
    return np.concatenate([corner, w[:, None], h[:, None]], axis=1).astype(np.int64)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers one request per line, until the process that asks is gone: then its end of the pipe is closed,
    however it ended.

    A request is a list of jobs, each the arguments of :func:`decode`, or a path alone to look at its
    beginning. An answer is for each job a length with a sign, in 8 bytes, and so many bytes: pixels, or after
    a negative length the reason why there are none.
    """
    for line in requests:
        for job in json.loads(line):
            try:
                body = _answer(job)
                length = len(body)
            except Exception as error:  # whatever a damaged file makes Pillow raise
                body = reason(error).encode()
                length = -len(body)
            answers.write(length.to_bytes(8, "little", signed=True) + body)
        answers.flush()


def reason(error: Exception) -> str:
    """What an error says, as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _answer(job: list[Any]) -> bytes:
    if len(job) == 1:
        readable(job[0])
        return b""
    return decode(*job).tobytes()


if __name__ == "__main__":
    import signal

    # These reach the whole group of processes; only the one that trains decides what they mean, and it may
    # still need a worker to finish its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # Python would complain once more when it flushes stdout on its way out.
        sys.stdout = None
