"""Contact sheets with names beside their rows, above their columns or below their images.

The PNG stores its layout in a text chunk, so that a reader can cut the single images out of it again.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.images import contact_sheet
from driftgen.support.untrusted_files import check_regular

if TYPE_CHECKING:
    from PIL import Image, ImageFont

__all__ = ["RECORD", "SHEET", "Sheet", "read_sheet", "write_sheet"]

KEY = "driftgen-sheet"  # keyword of the text chunk
RECORD, SHEET = "samples.json", "grid.png"  # of a folder of samples
GAP = 2
INK = "#333333"
LONGEST = 190  # maximum width of the names of the rows in pixels
MOST_IMAGES = 10_000  # of a layout that is believed
SMALLEST_FONT = 10  # in pixels; longer texts are cut


@dataclass(frozen=True)
class Sheet:
    """Images of one size in rows, with optional names.

    Attributes:
        images: row by row.
        columns: images per row.
        row_names: one per row, or none.
        column_names: one per column, or none.
        captions: one per image, or none.
        note: a line below the images, or none.
    """

    images: Sequence[Image.Image]
    columns: int
    row_names: Sequence[str] = ()
    column_names: Sequence[str] = ()
    captions: Sequence[str] = ()
    note: str = ""

    @property
    def rows(self) -> int:
        """Number of rows; the last one may be incomplete."""
        return -(-len(self.images) // self.columns)


def write_sheet(path: Path, sheet: Sheet) -> Path:
    """Draw a sheet with its names and write it as a PNG; return the path."""
    from PIL.PngImagePlugin import PngInfo

    picture, layout = _draw(sheet)
    info = PngInfo()
    info.add_text(KEY, json.dumps(layout))  # ASCII, as text chunks are
    make_folder(path.parent)
    with atomic_write(path) as scratch:
        picture.save(scratch, pnginfo=info)
    return path


def read_sheet(path: Path) -> Sheet | None:
    """Read a sheet; None if the file is no image.

    A file without a layout, such as one of an earlier version, is a sheet of one image.
    """
    from driftgen.support.image_files import open_image

    try:
        with open_image(check_regular(path)) as image:
            image.load()
            text = image.info.get(KEY)
            picture = image.convert("L" if image.mode in ("1", "L") else "RGB")
    except Exception:  # damaged files raise many types
        return None
    try:
        return _cut(picture, json.loads(text)) if isinstance(text, str) else Sheet([picture], 1)
    except Exception:  # a layout of another program
        return Sheet([picture], 1)


def _draw(sheet: Sheet) -> tuple[Image.Image, dict[str, Any]]:
    from PIL import Image, ImageDraw

    width, height = sheet.images[0].size
    zoom = max(1, 64 // max(width, height))  # as contact_sheet enlarges
    cell = (width * zoom, height * zoom)
    size = min(max(cell[1] // 5, 12), 22)
    font, small = _font(size), _fitting_font([*sheet.captions, *sheet.column_names], cell[0], size)
    line = sum(font.getmetrics()) + 2
    below = line if sheet.captions else 0
    grid = contact_sheet(sheet.images, sheet.columns, GAP, below)
    longest = max((font.getlength(name) for name in sheet.row_names), default=0.0)
    left = round(min(longest, LONGEST)) + 14 if sheet.row_names else 0
    top = line + 4 if sheet.column_names else 0
    bottom = line + 4 if sheet.note else 0
    picture = Image.new(grid.mode, (left + grid.width, top + grid.height + bottom), "white")
    picture.paste(grid, (left, top))
    pitch = (cell[0] + GAP, cell[1] + GAP + below)
    draw = ImageDraw.Draw(picture)
    for row, name in enumerate(sheet.row_names):
        middle = top + GAP + row * pitch[1] + cell[1] / 2
        draw.text((left - 8, middle), _fit(name, LONGEST, font), INK, font, anchor="rm")
    for column, name in enumerate(sheet.column_names):
        middle = left + GAP + column * pitch[0] + cell[0] / 2
        draw.text((middle, top - 4), _fit(name, cell[0], small), INK, small, anchor="ms")
    for i, name in enumerate(sheet.captions):
        row, column = divmod(i, sheet.columns)
        middle = left + GAP + column * pitch[0] + cell[0] / 2
        draw.text(
            (middle, top + GAP + row * pitch[1] + cell[1] + 1),
            _fit(name, cell[0], small),
            INK,
            small,
            anchor="ma",
        )
    if sheet.note:
        corner = (GAP, top + grid.height + 2)
        draw.text(corner, _fit(sheet.note, picture.width - 2 * GAP, font), INK, font, anchor="la")
    layout = {
        "count": len(sheet.images),
        "columns": sheet.columns,
        "zoom": zoom,
        "cell": cell,
        "pitch": pitch,
        "corner": (left + GAP, top + GAP),
        "row_names": list(sheet.row_names),
        "column_names": list(sheet.column_names),
        "captions": list(sheet.captions),
        "note": sheet.note,
    }
    return picture, layout


def _cut(picture: Image.Image, layout: dict[str, Any]) -> Sheet:
    """Cut the images out of a sheet. Raises for a layout that does not fit the picture."""
    count, columns, zoom = (int(layout[key]) for key in ("count", "columns", "zoom"))
    (width, height), (right, down), (left, top) = (map(int, layout[k]) for k in ("cell", "pitch", "corner"))
    rows = -(-count // max(columns, 1))
    fits = (
        1 <= columns <= count <= MOST_IMAGES
        and 1 <= zoom <= min(width, height)
        and width % zoom == height % zoom == 0
        and right >= width
        and down >= height
        and min(left, top) >= 0
        and left + (columns - 1) * right + width <= picture.width
        and top + (rows - 1) * down + height <= picture.height
    )
    if not fits:
        raise ValueError("the layout does not fit the picture")
    names = {}
    for key, number in (("row_names", rows), ("column_names", columns), ("captions", count)):
        names[key] = tuple(map(str, layout.get(key) or ()))
        if len(names[key]) not in (0, number):
            raise ValueError(f"{len(names[key])} {key}, expected {number}")
    images = []
    for i in range(count):
        x, y = left + i % columns * right, top + i // columns * down
        image = picture.crop((x, y, x + width, y + height))
        # Pixels were repeated: reducing them is exact.
        images.append(image.reduce(zoom) if zoom > 1 else image)
    return Sheet(images, columns, **names, note=str(layout.get("note") or ""))


def _fit(text: str, width: float, font: ImageFont.FreeTypeFont) -> str:
    """Shorten a text to a width in pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def _fitting_font(texts: Sequence[str], width: float, size: int) -> ImageFont.FreeTypeFont:
    """Return the largest font of up to ``size`` in which every text fits a width, or a small one."""
    sizes = range(size, SMALLEST_FONT, -1)
    fits = (_font(s) for s in sizes if all(_font(s).getlength(text) <= width for text in texts))
    return next(fits, _font(SMALLEST_FONT))


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans, which matplotlib ships, without importing matplotlib."""
    from PIL import ImageFont

    spec = importlib.util.find_spec("matplotlib")
    assert spec is not None
    assert spec.origin is not None
    return ImageFont.truetype(Path(spec.origin).parent / "mpl-data/fonts/ttf/DejaVuSans.ttf", size)
