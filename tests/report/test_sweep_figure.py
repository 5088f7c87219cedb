import xml.etree.ElementTree as ElementTree

import pytest
from PIL import Image, ImageColor

import driftgen as dg
from driftgen.report.figures import DATA_COLOR, GENERATED_COLOR
from driftgen.report.sweep_figure import draw_sweep

ALPHAS = (1.0, 1.3, 1.6, 2.0)


def rows(*keys, alphas=ALPHAS):
    values = {
        "FID": lambda a: 2 + (a - 1.2) ** 2,
        "inception_score": lambda a: 8 + a,
        "precision": lambda a: 0.5 + 0.1 * a,
        "recall": lambda a: 0.7 - 0.1 * a,
    }
    return [{"guidance": a} | {key: values[key](a) for key in keys} for a in alphas]


def pixels_of(path, color):
    """Number of pixels of a color."""
    with Image.open(path) as picture:
        counts = {c: n for n, c in picture.convert("RGB").getcolors(2**24)}
    return counts.get(ImageColor.getrgb(color), 0)


def words(path):
    """Texts of an SVG."""
    return [
        "".join(node.itertext()).strip()
        for node in ElementTree.parse(path).iter()
        if node.tag.endswith("}text")
    ]


def test_the_three_panels_of_the_paper(tmp_path):
    given = rows("FID", "inception_score", "precision", "recall")
    png, svg = draw_sweep(given[::-1], "FID", tmp_path, "a model, 50,000 samples")
    assert (png, svg) == (tmp_path / "sweep.png", tmp_path / "sweep.svg")
    assert pixels_of(png, GENERATED_COLOR) > 300
    assert pixels_of(png, DATA_COLOR) > 300
    texts = words(svg)
    assert "a model, 50,000 samples" in texts
    assert texts.count("guidance α") == 2
    assert texts.count("FID") == 2  # against α, and as the axis of the last panel
    assert texts.count("Inception score") == 2
    assert "precision" not in texts
    assert [t for t in texts if t.startswith("α = ")] == ["α = 1"]
    assert {"1.3", "1.6", "2"} <= set(texts)
    assert "2.01" in texts  # the best FID, at 1.3
    assert "10" in texts  # the best Inception score
    before = svg.read_bytes()
    draw_sweep(given, "FID", tmp_path, "a model, 50,000 samples")
    assert svg.read_bytes() == before


def test_precision_against_recall_without_inception_scores(tmp_path):
    given = [{"FD-pixels": row.pop("FID"), **row} for row in rows("FID", "precision", "recall")]
    given[0]["inception_score"] = None
    given[1]["inception_score"] = float("nan")
    _, svg = draw_sweep(given, "FD-pixels", tmp_path, "digits")
    texts = words(svg)
    assert texts.count("FD-pixels") == 1
    assert "precision and recall" in texts
    assert "Inception score" not in texts
    assert "α = 1" in texts


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow), 30])
def test_any_number_of_points(tmp_path, count):
    given = rows("FID", "inception_score", alphas=[1 + 0.05 * i for i in range(count)])
    png, _ = draw_sweep(given, "FID", tmp_path, "title")
    assert pixels_of(png, GENERATED_COLOR) > 50


def test_one_metric_only(tmp_path):
    png, svg = draw_sweep(rows("FID"), "FID", tmp_path, "$ stays $")
    assert words(svg).count("guidance α") == 1
    assert "$ stays $" in words(svg)
    assert pixels_of(png, DATA_COLOR) == 0
    _, svg = draw_sweep(rows("precision"), "FID", tmp_path, "title")
    assert "precision" in words(svg)


def test_the_title_names_the_number_of_samples(tmp_path):
    _, svg = draw_sweep([{"guidance": 1, "FID": 2.5, "samples": 50_000}], "FID", tmp_path)
    assert "Guidance sweep, 50,000 samples each" in words(svg)
    _, svg = draw_sweep(rows("FID"), "FID", tmp_path)
    assert "Guidance sweep" in words(svg)


def test_wrong_rows(tmp_path):
    with pytest.raises(dg.InputError, match="rows is empty"):
        draw_sweep([], "FID", tmp_path, "title")
    with pytest.raises(dg.InputError, match="rows hold no finite value of 'FID', 'inception_score'"):
        draw_sweep([{"guidance": 1, "FID": float("nan")}], "FID", tmp_path, "title")
    assert not list(tmp_path.iterdir())
