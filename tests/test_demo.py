"""The demo with fewer steps."""

import json
import re

import pytest

from driftgen.demo import _draw_packaged, demo_config, run_demo
from driftgen.evaluation.digits import BARS
from driftgen.generators import UNet2D
from driftgen.interop import packaged
from driftgen.pipeline import DriftPipeline
from driftgen.support.sheets import read_sheet
from tests.support.runs import SMALL, Silent


@pytest.mark.slow
def test_demo_trains_samples_evaluates_and_reports(tmp_path):
    out, view = tmp_path / "demo", Silent()
    page, figures = run_demo(out, view, changes=[*SMALL, "optim.steps=12"], toy_steps=3)
    assert page == out / "report.html"
    html = page.read_text()
    assert html.count("data:image/gif;base64,") == 1  # the toy
    assert html.count("data:image/") >= 5  # two sheets, real images, two figures of the toy
    assert "nearest training images" in html.lower()
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)  # the page is self-contained
    assert "one network call" in html.lower()
    record = json.loads((out / "evaluation.json").read_text())
    assert record["network_calls_per_image"] == 1
    assert record["figures"] == figures
    assert set(BARS) <= set(figures)
    assert len(view.rows) > 0
    # A complete demo is not trained again.
    again, same = run_demo(out, Silent(), changes=[*SMALL, "optim.steps=12"], toy_steps=3)
    assert again == page
    assert same == figures


def test_the_demo_shows_the_best_packaged_model(tmp_path, monkeypatch):
    folder, sheet = tmp_path / "packaged", tmp_path / "packaged.png"
    monkeypatch.setattr(packaged, "FOLDER", folder)
    for name in ("digits", "cifar10"):
        net = UNet2D(num_classes=2, widths=(32,), blocks=(1,), attention_levels=(), input_size=8)
        DriftPipeline(net, class_names=["cat", "dog"]).save_pretrained(folder / name)
        _draw_packaged(sheet, seed=0)
        assert sheet.exists() == (name == "cifar10")
    shown = read_sheet(sheet)
    assert (len(shown.images), shown.row_names) == (16, ("cat", "dog"))
    assert "driftgen sample cifar10" in shown.note
    assert shown.images[9].tobytes() == DriftPipeline(net)(1, num_images=10, seed=0)[9].tobytes()


def test_the_demo_has_a_fixed_number_of_steps():
    """The result does not depend on the load of the machine."""
    assert demo_config().optim.steps == demo_config(3).optim.steps
    assert demo_config(3).seed == 3
