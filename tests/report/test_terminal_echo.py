"""The echo of ^C does not break a live view."""

import pytest
from rich.console import Console

from driftgen.report.terminal import LiveView
from driftgen.support.progress import track
from tests.support.screens import Terminal, show

WARNING = "x" * 74  # fills its line


@pytest.fixture
def terminal():
    opened = Terminal()
    yield opened
    opened.close()


@pytest.fixture
def console(terminal):
    return Console(file=terminal.file, force_terminal=True, width=80, color_system=None)


def test_the_screen_is_that_of_a_terminal():
    assert show("a" * 80 + "^C\rb", 80) == ["a" * 80, "bC"]
    assert show("one\r\ntwo\r\x1b[2K\x1b[1A\x1b[2Kthree", 80) == ["three", ""]


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("warned", [False, True], ids=["bar", "warning"])
def test_a_run_shows_one_bar_after_ctrl_c(terminal, console, warned, presses):
    with LiveView("runs/photos", 450, console=console) as view:
        if warned:
            view.warn(WARNING)
        view._live.refresh()
        for _ in range(presses):
            terminal.press(b"\x03")
        view.info("Ctrl-C: saving after this step")
        view.advance(1, None)
    lines = terminal.lines()
    assert lines[0] == "Ctrl-C: saving after this step"
    assert [line[:11] for line in lines].count("runs/photos") == 1
    assert " 1/450" in lines[1]
    assert not any("^C" in line for line in lines)


def test_other_work_shows_one_bar_after_ctrl_c(terminal, console):
    with track("training images", 1000, "similarity", console) as on_step:
        on_step(1, 0.5)
        terminal.press(b"\x03")
        on_step(1000, 0.5)
    lines = [line for line in terminal.lines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("training images")
