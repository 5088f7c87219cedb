import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftgen.report.chart import make_chart, short_number, step_label
from driftgen.report.curves import Panel

VALUES = st.floats(-1e90, 1e90, allow_nan=False).filter(lambda v: v == 0 or abs(v) > 1e-90)


def points(curve):
    return [tuple(map(float, point.split())) for point in curve.path[1:].split("L")]


@settings(max_examples=40)
@given(st.lists(VALUES, min_size=1, max_size=20), st.booleans(), st.integers(1, 10**9))
def test_every_point_is_inside_and_maps_back_to_its_value(values, log, stride):
    steps = [float(stride * (i + 1)) for i in range(len(values))]
    chart = make_chart(Panel("x", "", {"x": (steps, values)}, log=log))
    scale, across, up = chart.scale, chart.right - chart.left, chart.bottom - chart.top
    for (x, y), step, value in zip(points(chart.curves[0]), steps, values, strict=True):
        assert chart.left <= x <= chart.right
        assert chart.top <= y <= chart.bottom
        back = scale["y0"] + (chart.bottom - y) / up * (scale["y1"] - scale["y0"])
        expected = math.log10(value) if scale["log"] else value
        assert back == pytest.approx(expected, abs=0.06 / up * (scale["y1"] - scale["y0"]))  # 0.1 units
        where = scale["x0"] + (x - chart.left) / across * (scale["x1"] - scale["x0"])
        assert where == pytest.approx(step, abs=0.06 / across * (scale["x1"] - scale["x0"]))
    positions = [tick.position for tick in chart.y_ticks]
    assert 2 <= len(positions) <= 9
    assert positions == sorted(set(positions), reverse=True)
    assert len({tick.label for tick in chart.y_ticks}) == len(positions)
    assert all(chart.top <= p <= chart.bottom for p in positions)
    assert all(chart.left <= tick.position <= chart.right for tick in chart.x_ticks)


def test_axes():
    rows = {"a": ([0.0, 100.0], [0.02, 0.9]), "b": ([50.0], [0.1]), "none": ([], [])}
    chart = make_chart(Panel("x", "", rows, log=True))
    assert [tick.label for tick in chart.y_ticks] == ["0.02", "0.05", "0.1", "0.2", "0.5", "1"]
    assert [tick.label for tick in chart.x_ticks] == ["0", "20", "40", "60", "80", "100"]
    assert [(c.name, c.color, c.dot is not None) for c in chart.curves] == [("a", 0, False), ("b", 1, True)]
    chart = make_chart(Panel("x", "", {"a": ([10.0, 20.0], [6.0, 6.1])}, level=1.0))
    assert [tick.label for tick in chart.y_ticks] == ["0", "2", "4", "6", "8"]  # flat curves look flat
    assert chart.top < chart.level < chart.bottom
    chart = make_chart(Panel("x", "", {"a": ([1.0, 2.0], [1e-9, 1e3])}, log=True))
    assert [tick.label for tick in chart.y_ticks] == ["1e-9", "1e-7", "1e-5", "0.001", "0.1", "10", "1,000"]


def test_labels():
    assert [step_label(x) for x in (0, 1500, 20000, 1.5e6)] == ["0", "1,500", "20k", "1.5M"]
    assert [short_number(x) for x in (0.017823, 988.4, 3112.0, 0, 2e9)] == [
        "0.0178",
        "988",
        "3,110",
        "0",
        "2e+09",
    ]
