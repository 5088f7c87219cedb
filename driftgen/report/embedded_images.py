"""Images of a page as data URIs: sheets without their margins, compressed, on a transparent ground."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, features

from driftgen.support.image_files import open_image
from driftgen.support.sheets import Sheet
from driftgen.support.untrusted_files import check_regular

__all__ = ["Picture", "embed_file", "embed_images", "embed_sheet"]

LEAST_CELL = 24  # pixels; smaller images are enlarged, so that the gap between them is thin
SMOOTH_WIDTH = 700  # pixels; narrower sheets are enlarged by the browser without smoothing
LOSSLESS_VALUES = 100_000  # pixels before enlarging; images of more are compressed with a loss
QUALITY = 88
KINDS = {".png": "png", ".gif": "gif", ".webp": "webp", ".jpg": "jpeg", ".jpeg": "jpeg"}


@dataclass(frozen=True)
class Picture:
    """An embedded image.

    Attributes:
        src: data URI.
        width: in pixels.
        height: in pixels.
        row_names: names of the rows of a sheet, or none.
        rows: number of rows of a sheet.
        pixelated: True if the browser should enlarge it without smoothing.
    """

    src: str
    width: int
    height: int
    row_names: tuple[str, ...] = ()
    rows: int = 1
    pixelated: bool = False


def embed_sheet(sheet: Sheet, max_width: int) -> Picture:
    """Embed the images of a sheet as one image; the page shows the names as text.

    A sheet of one image, as those without a layout are, is embedded as it is.
    """
    if len(sheet.images) == 1:
        picture = _limited(sheet.images[0], max_width)
        values = picture.width * picture.height
        return Picture(_uri(picture, values), *picture.size, pixelated=picture.width < SMOOTH_WIDTH)
    width, height = sheet.images[0].size
    zoom = max(1, -(-LEAST_CELL // max(width, height)))
    gap = 1 if width * zoom < 48 else 2
    scale = min(1.0, (max_width / sheet.columns - gap) / (width * zoom))
    cell = (max(1, round(width * zoom * scale)), max(1, round(height * zoom * scale)))
    rows = sheet.rows
    size = (sheet.columns * (cell[0] + gap) - gap, rows * (cell[1] + gap) - gap)
    canvas = Image.new("RGBA", size, (0, 0, 0, 0))
    resample = Image.Resampling.NEAREST if scale == 1 else Image.Resampling.LANCZOS
    for i, image in enumerate(sheet.images):
        row, column = divmod(i, sheet.columns)
        corner = (column * (cell[0] + gap), row * (cell[1] + gap))
        canvas.paste(image.convert("RGB").resize(cell, resample), corner)
    src = _uri(canvas, width * height * len(sheet.images))
    return Picture(src, *size, tuple(sheet.row_names), rows, size[0] < SMOOTH_WIDTH)


def embed_images(images: list[Image.Image], max_width: int) -> list[Picture]:
    """Embed images one by one."""
    pictures = [_limited(image, max_width) for image in images]
    return [
        Picture(_uri(picture, picture.width * picture.height), *picture.size, pixelated=picture.width < 64)
        for picture in pictures
    ]


def embed_file(path: Path) -> Picture | None:
    """Embed the bytes of an image file, such as an animation; None if it cannot be read."""
    try:
        with open_image(check_regular(path)) as image:
            image.verify()
            size, kind = image.size, KINDS[path.suffix.lower()]
        data = path.read_bytes()
    except Exception:  # damaged files raise many types
        return None
    return Picture(_data_uri(data, kind), *size)


def _limited(image: Image.Image, max_width: int) -> Image.Image:
    if image.width <= max_width:
        return image
    height = max(1, round(image.height * max_width / image.width))
    return image.resize((max_width, height), Image.Resampling.LANCZOS)


def _uri(image: Image.Image, values: int) -> str:
    """Compress an image: without loss if it shows few values, otherwise as lossy WebP."""
    if not features.check("webp"):
        return _data_uri(_compressed(image, "PNG", optimize=True), "png")
    if values <= LOSSLESS_VALUES:
        return _data_uri(_compressed(image, "WEBP", lossless=True, quality=50, method=3), "webp")
    return _data_uri(_compressed(image, "WEBP", quality=QUALITY, method=2), "webp")


def _compressed(image: Image.Image, kind: str, **options: int | bool) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _data_uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64," + base64.b64encode(data).decode()
