"""Only images of the documented formats are opened, wherever they come from."""

import io

import pytest
from PIL import Image, UnidentifiedImageError

from driftgen.data import decode
from driftgen.data.locate import IMAGE_SUFFIXES
from driftgen.support.image_files import FORMATS, open_image

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def test_formats_are_those_of_the_endings():
    Image.init()
    assert {Image.EXTENSION[suffix] for suffix in IMAGE_SUFFIXES} == set(FORMATS)


def test_other_formats_are_refused(tmp_path):
    path = tmp_path / "e.png"
    path.write_bytes(POSTSCRIPT)
    with Image.open(path) as image:
        assert image.format == "EPS"  # which Pillow hands to Ghostscript
    tga = io.BytesIO()
    Image.new("RGB", (8, 8)).save(tga, "TGA")
    for file in (str(path), POSTSCRIPT, tga.getvalue()):
        for call in (decode.readable, lambda file: decode.decode(file, 8, 3)):
            with pytest.raises(UnidentifiedImageError, match=r"^not a BMP, GIF, .* image: convert it$"):
                call(file)
    with pytest.raises(UnidentifiedImageError, match=r"^not a PNG or JPEG image"):
        open_image(io.BytesIO(b"GIF89a"), ("PNG", "JPEG"))
