"""The demo with fewer steps."""

import json
import re

import pytest

from driftgen.demo import demo_config, run_demo
from driftgen.evaluation.digits import BARS
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


def test_the_demo_has_a_fixed_number_of_steps():
    """The result does not depend on the load of the machine."""
    assert demo_config().optim.steps == demo_config(3).optim.steps
    assert demo_config(3).seed == 3
