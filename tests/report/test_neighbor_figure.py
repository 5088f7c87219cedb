import numpy as np
import pytest
from PIL import Image

from driftgen.report.neighbor_figure import NeighborRow, draw_neighbors
from tests.support.image_data import noise

ORANGE = (240, 130, 15)


def row(side=(8, 8), neighbors=2, name="cat", similarities=(0.99, 0.5), channels=3, level=None):
    shape = side if channels == 1 else (*side, channels)
    images = [
        noise(*shape) if level is None else np.full(shape, level, np.uint8) for _ in range(neighbors + 1)
    ]
    return NeighborRow(images[0], name, images[1:], similarities[:neighbors], [name] * neighbors)


def picture(path):
    with Image.open(path) as opened:
        return np.asarray(opened.convert("RGB")).astype(int)


def colored(array, color):
    return int((np.abs(array - color).sum(axis=2) < 12).sum())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [(8, 8), (100, 100), (8, 16)])
def test_every_image_is_drawn(tmp_path, side, channels):
    level = 77
    rows = [row(side, channels=channels, level=level) for _ in range(2)]
    draw_neighbors({"first": rows, "closest": rows}, tmp_path / "n.png", "title", "note", 0.9)
    found = picture(tmp_path / "n.png")
    cell = 0.86 * 110
    area = cell * cell * side[0] / side[1]
    assert colored(found, (level,) * 3) == pytest.approx(12 * area, rel=0.08)


def test_similarities_above_the_threshold_are_orange(tmp_path):
    def count(threshold):
        draw_neighbors({"first": [row(level=0)]}, tmp_path / "n.png", "title", "note", threshold)
        return colored(picture(tmp_path / "n.png"), ORANGE)

    assert count(1.0) < count(0.9) < count(0.4)


def test_the_order_of_the_columns(tmp_path):
    levels = [30, 100, 200]
    images = [np.full((8, 8), level, np.uint8) for level in levels]
    shown = NeighborRow(images[0], "", images[1:], (0.9, 0.8), ("", ""))
    draw_neighbors({"first": [shown]}, tmp_path / "n.png", "title", "note", 0.95)
    found = picture(tmp_path / "n.png")
    centers = [np.argwhere((found == level).all(axis=2))[:, 1].mean() for level in levels]
    assert centers == sorted(centers)


def test_long_names_and_notes_stay_inside(tmp_path):
    rows = [row(name="a flying squirrel of $1", neighbors=1)]
    draw_neighbors({"first": rows, "closest": rows}, tmp_path / "n.png", "title", "long words " * 30, 0.9)
    found = picture(tmp_path / "n.png")
    for edge in (found[0], found[-1], found[:, 0], found[:, -1]):
        assert (edge == 255).all()
