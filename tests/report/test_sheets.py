"""Texts of contact sheets: names fit their cells."""

import pytest

from driftgen.support.sheets import _fit, _fitting_font


@pytest.mark.parametrize(("name", "shown"), [("automobile", "automobile"), ("a" * 40, None), ("cat", "cat")])
def test_names_fit_a_cell(name, shown):
    font = _fitting_font([name, "dog"], 64, 12)
    text = _fit(name, 64, font)
    assert font.getlength(text) <= 64
    assert text == shown or (shown is None and text.endswith("…") and len(text) > 8)


def test_short_names_keep_the_size():
    assert _fitting_font(["cat", "ship"], 64, 12).size == 12
    assert _fitting_font([], 64, 22).size == 22
