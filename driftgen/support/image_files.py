"""Image files from elsewhere, opened in the formats of the documented endings alone.

It imports only Pillow, because the worker processes of :mod:`driftgen.data.decode` import it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO, Any

from PIL import Image, UnidentifiedImageError

__all__ = ["FORMATS", "open_image"]

# Those of driftgen.data.locate.IMAGE_SUFFIXES. Pillow knows forty more by their first bytes, whatever the
# file is named; it hands EPS, for example, to Ghostscript, which executes it.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")

# Its messages about damaged files, without their names, would be printed wherever logging has no handler.
logging.getLogger("PIL").addHandler(logging.NullHandler())


def open_image(file: str | Path | IO[bytes] | Any, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    """Open an image without decoding it; raise ``UnidentifiedImageError`` if it has another format."""
    try:
        return Image.open(file, formats=formats)
    except UnidentifiedImageError:  # its message holds an address in memory
        known = f"{', '.join(formats[:-1])} or {formats[-1]}"
        raise UnidentifiedImageError(f"not a {known} image: convert it") from None
