"""Decode images to uint8. Run as a script, this file is a worker process.

It imports numpy, Pillow and one small module of the package, so that a worker starts in a fraction of a
second and never loads torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import sys
import warnings
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

if __name__ == "__main__":  # the package may be known to the parent process alone; last, to shadow nothing
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from driftgen.support.image_files import open_image

if TYPE_CHECKING:
    from collections.abc import Sequence

    # A file, [file, offset, length] for a part of one, or the encoded image itself.
    Encoded = str | list[Any] | bytes

__all__ = ["CROP_UNIFORMS", "center_crop", "convert", "crop_boxes", "decode", "readable", "reason"]

TRIES = 10
CROP_UNIFORMS = 2 * TRIES + 2  # uniform numbers per random resized crop
HEADER = 65536  # bytes that hold the header of nearly every image
MAX_PIXELS = 2**27  # of one image: 0.5 GB in memory. Pillow alone stops at 179 million
THIN = 16  # ratio of the sides beyond which an image is cropped and resized in one step
ROWS = 256  # rows that are converted at a time


def decode(
    image: Encoded,
    size: int,
    channels: int,
    uniforms: Sequence[float] | None = None,
    scale: tuple[float, float] = (0.2, 1.0),
) -> NDArray[np.uint8]:
    """Decode an image to ``[size, size, channels]`` as a viewer shows it, with its EXIF orientation.

    The image is center-cropped, or cropped at random if ``uniforms`` are given.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow would warn about odd metadata in every file
        with open_image(_open(image)) as file:
            _check_pixels(file)
            picture = convert(_upright(file), channels)
    if uniforms is None:
        picture = center_crop(picture, size)
    else:
        left, top, width, height = crop_boxes(*picture.size, np.asarray([uniforms]), scale)[0].tolist()
        box = (left, top, left + width, top + height)
        picture = picture.crop(box).resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(picture, dtype=np.uint8).reshape(size, size, channels)


def readable(image: Encoded) -> tuple[int, int]:
    """Return width and height, or raise an exception if there is no image header."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if isinstance(image, list) and image[2] > HEADER:
            try:  # without reading all of a large shard
                with open_image(_open([*image[:2], HEADER])) as file:
                    _check_pixels(file)
                    return file.size
            except Exception:  # some formats need the whole file, such as TIFF with its directory at the end
                pass
        with open_image(_open(image)) as file:
            _check_pixels(file)
            return file.size


def _check_pixels(file: Image.Image) -> None:
    width, height = file.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width}x{height} pixels, at most {MAX_PIXELS:,} are decoded: make it smaller")


def _upright(file: Image.Image) -> Image.Image:
    """Apply the EXIF orientation. Damaged EXIF data are ignored, as viewers do."""
    file.load()  # a damaged image raises here, and not below
    try:
        return ImageOps.exif_transpose(file)
    except Exception:  # Pillow raises many types
        return file


def _open(image: Encoded) -> str | BinaryIO:
    """Return what Pillow opens. Anything but a regular file is refused: opening a named pipe would block."""
    if isinstance(image, bytes):
        return io.BytesIO(image)
    where: list[Any] = image if isinstance(image, list) else [image]
    path, *part = where
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError("not a regular file")
    if not part:
        return str(path)
    with open(path, "rb") as file:
        file.seek(part[0])
        return io.BytesIO(file.read(part[1]))


def convert(image: Image.Image, channels: int) -> Image.Image:
    """Convert any mode to gray (``channels`` 1) or color (3).

    Transparent pixels become white. 16-bit values are divided by 257. Floating-point values are taken as
    0 ... 1, or as 0 ... 255 if any exceeds 1.
    """
    if image.mode == "F":
        values = np.nan_to_num(np.asarray(image))
        top = 1.0 if values.max() <= 1 else 255.0
        image = _to_bytes(values, top)
    elif image.mode.startswith("I"):
        wide, transparent = np.asarray(image), image.info.get("transparency")
        image = _to_bytes(wide, 65535.0)
        if isinstance(transparent, int):
            image.paste(255, mask=Image.fromarray(wide == transparent))
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


def _to_bytes(values: NDArray[Any], top: float) -> Image.Image:
    """Scale 0 ... ``top`` to 0 ... 255, some rows at a time to bound the memory."""
    out = np.empty(values.shape, np.uint8)
    for start in range(0, len(values), ROWS):
        part = slice(start, start + ROWS)
        out[part] = (values[part].astype(np.float64).clip(0, top) * 255 / top).round()
    return Image.fromarray(out)


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """ADM's center crop: halve until less than twice ``size``, resize the short side, crop the center.

    An image with one side ``THIN`` times as long as the other is cropped and resized in one step: resizing
    it first would take memory in proportion. Pixels differ by rounding alone, by at most one level.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    factor = size / min(image.size)
    width, height = round(image.width * factor), round(image.height * factor)
    if max(width, height) > THIN * size:
        x, y = image.width / width, image.height / height  # source pixels per pixel
        left, top = (width - size) // 2, (height - size) // 2
        box = (left * x, top * y, min((left + size) * x, image.width), min((top + size) * y, image.height))
        return image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def crop_boxes(
    width: int, height: int, uniforms: NDArray[np.float64], scale: tuple[float, float]
) -> NDArray[np.int64]:
    """Compute random resized crops ``[n, 4]`` (left, top, width, height) from ``[n, CROP_UNIFORMS]``.

    The area fraction is uniform in ``scale``, the aspect ratio log-uniform in 3/4 ... 4/3. The first of ten
    tries that fits into the image is used, or else the largest centered crop with an allowed ratio.
    """
    low, high = math.log(3 / 4), math.log(4 / 3)
    area = width * height * (scale[0] + (scale[1] - scale[0]) * uniforms[:, :TRIES])
    ratio = np.exp(low + (high - low) * uniforms[:, TRIES : 2 * TRIES])
    w, h = (np.maximum(1, np.rint(np.sqrt(a))) for a in (area * ratio, area / ratio))
    fits = (w <= width) & (h <= height)
    first = np.arange(len(uniforms)), fits.argmax(axis=1)
    valid = fits[first]
    fallback = min(width, max(1, round(height * 4 / 3))), min(height, max(1, round(width * 4 / 3)))
    w, h = (np.where(valid, side[first], other) for side, other in zip((w, h), fallback, strict=True))
    margin = np.stack([width - w, height - h], axis=1)
    corner = np.where(valid[:, None], np.floor(uniforms[:, -2:] * (margin + 1)), margin // 2)
    return np.concatenate([corner, w[:, None], h[:, None]], axis=1).astype(np.int64)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Reply to one request per line until the pipe is closed, which happens however the parent process ends.

    A request is a JSON list of jobs. A job holds the arguments of :func:`decode`, or only an image to check
    its header. An image that is passed as bytes is replaced by their number; the bytes of all such images
    follow the line. The reply to a job is a signed 8-byte length and that many bytes: pixels or, if the
    length is negative, the error message.
    """
    for line in requests:
        jobs = json.loads(line)
        # All of them before the first reply: the parent writes the whole request before it reads.
        for job in jobs:
            if isinstance(job[0], int):
                job[0] = requests.read(job[0])
        for job in jobs:
            try:
                body = _run(job)
                length = len(body)
            except Exception as error:  # Pillow raises many types for damaged files
                body = reason(error).encode()
                length = -len(body)
            replies.write(length.to_bytes(8, "little", signed=True) + body)
        replies.flush()


def reason(error: Exception) -> str:
    """Return the type and message of an error as one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _run(job: list[Any]) -> bytes:
    if len(job) == 1:
        readable(job[0])
        return b""
    return decode(*job).tobytes()


if __name__ == "__main__":
    import signal

    # These signals reach the whole process group. Only the training process handles them, and it may still
    # need a worker to finish its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        # Otherwise Python would report a second error when it flushes stdout at exit.
        sys.stdout = None
