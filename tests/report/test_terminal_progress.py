"""Signs of life in the terminal and in redirected output."""

import io
import re
import time
from dataclasses import replace

import pytest
from rich.console import Console

from driftgen.report.terminal import LiveView, facts_text, wrap_line
from driftgen.training.step_clock import Speed
from driftgen.training.summary import Summary

ROWS = {"data": "1,600 color images of 32x32 pixels, 4 classes; smallest: cat with 390", "device": "cpu"}
COMMAND = "driftgen train folder --set data.path=photos --set " + "optim.steps=1 " * 8


def summary(step=0, compile_key=None):
    return Summary(ROWS, step, COMMAND.strip(), compile_key)


def shown(view):
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(view.render())
    return console.file.getvalue()


def test_the_bar_moves_with_every_step_from_the_first():
    view = LiveView("runs/x", 200, console=Console(file=io.StringIO()))
    with view:
        assert re.search(r" 0/200 preparing 0:00", shown(view))
        view.begin(summary())
        assert re.search(r" 0/200 first step 0:00", shown(view))
        view.advance(1, None)
        assert re.search(r" 1/200 +$", shown(view).splitlines()[0])
        view.advance(2, 0.5)
        assert re.search(r" 2/200 1:39 left", shown(view))
        assert "0.5 s/step" in shown(view)
        view.update({"step": 2, "drift": [0.1]})
        view.advance(3, 0.5)  # metrics come less often than steps
        assert " 3/200 " in shown(view)
        assert view.line() == "step 3/200, 0.5 s/step, 1:38 left, drift 0.1"


def test_both_speeds_are_of_the_same_steps():
    """The rate of a row is that since the last row: other steps than those of the mean time per step."""
    view = LiveView("runs/x", 200, console=Console(file=io.StringIO()))
    view.update({"step": 2, "samples_per_second": 4882.0})
    assert "4,882 samples/s" in view.line()
    view.begin(replace(summary(), samples_per_step=256))
    view.advance(2, 0.05)
    assert "20 steps/s, 5,120 samples/s, " in view.line()
    assert "20 steps/s · 5,120 samples/s" in shown(view)


def test_a_resumed_bar_starts_where_it_stopped():
    view = LiveView("runs/x", 200, console=Console(file=io.StringIO()))
    view.begin(summary(step=150, compile_key="some networks"))
    assert re.search(r" 150/200 compiling 0:00", shown(view))
    view.advance(151, None)
    view.advance(152, 2.0)
    assert re.search(r" 152/200 1:36 left", shown(view))


def test_a_slow_step_prints_lines():
    console = Console(file=io.StringIO(), width=80)
    with LiveView("runs/x", 200, console=console, heartbeat=0.1) as view:
        view.begin(summary(compile_key="some networks"))
        time.sleep(0.5)
        view.advance(1, None)
        view.advance(2, 0.5)
        time.sleep(0.25)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("step")]
    assert lines[0] == "step 0/200, compiling 0:00"
    assert len(lines) >= 4
    assert lines[-1] == "step 2/200, 0.5 s/step, 1:39 left"
    count = len(console.file.getvalue())
    time.sleep(0.25)
    assert len(console.file.getvalue()) == count  # the thread ended with the view


@pytest.mark.parametrize("rows", [10, 11, 13])
def test_redirected_output_has_each_row_once(rows):
    """Work after the last step, such as an evaluation, does not repeat the last row."""
    console = Console(file=io.StringIO(), width=80)
    with LiveView("runs/x", 10 * rows, console=console, heartbeat=0.1) as view:
        for i in range(1, rows + 1):
            view.advance(10 * i, 0.5)
            view.update({"step": 10 * i, "drift": [0.1]})
        view.info("evaluating")
        time.sleep(0.35)
    lines = console.file.getvalue().splitlines()
    assert lines[-1].startswith(f"step {10 * rows}/{10 * rows}, 0.5 s/step, finishing 0:0")
    row = f"step {10 * rows}/{10 * rows}, 0.5 s/step, drift 0.1"
    assert lines.index("evaluating") == 1 + lines.index(row)
    assert len([line for line in lines if "drift" in line]) == (2 if rows < 12 else 3)


def test_an_interrupted_run_prints_its_last_row_once():
    console = Console(file=io.StringIO(), width=80)
    with LiveView("runs/x", 200, console=console) as view:
        for i in range(1, 5):
            view.advance(10 * i, 0.5)
            view.update({"step": 10 * i, "drift": [0.1]})
        view.info("stopped after step 40")
    steps = [line.split("/")[0] for line in console.file.getvalue().splitlines()]
    assert steps == ["step 10", "step 40", "stopped after step 40"]


def test_lines_come_at_least_every_ten_seconds_by_default():
    assert LiveView("runs/x", 1)._heartbeat == 10


def test_other_processes_print_nothing():
    console = Console(file=io.StringIO(), quiet=True)
    with LiveView("runs/x", 200, console=console, heartbeat=0.01) as view:
        view.begin(summary())
        view.advance(1, None)
        time.sleep(0.1)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_the_summary_is_readable_and_its_command_whole(terminal):
    console = Console(width=60, file=io.StringIO(), force_terminal=terminal, color_system=None)
    view = LiveView("runs/x", 200, console=console)
    view.begin(summary())
    view.measured(Speed(0.25, 50.0, 12.5, 3 * 2**30))
    measured = ["measured: 0.25 s/step, 0:50 left, peak memory 3.0 GiB; the", "first step took 12.5 s"]
    assert console.file.getvalue().splitlines() == [
        "data    1,600 color images of 32x32 pixels, 4 classes;",
        "        smallest: cat with 390",
        "device  cpu",
        f"resume  {COMMAND.strip()}",
        *(measured if terminal else [" ".join(measured)]),
    ]


def test_lines_break_at_spaces_in_a_terminal_only():
    text = "stopped by Ctrl-C after step 17; run the same command to resume: " + COMMAND.strip()
    assert wrap_line(text, 40).splitlines() == [
        "stopped by Ctrl-C after step 17; run the",
        "same command to resume:",
        f"  {COMMAND.strip()}",  # whole, so that it can be copied
    ]
    assert wrap_line("a driftgen run", 40) == "a driftgen run"
    for terminal, lines in ((True, 3), (False, 1)):
        console = Console(width=80, file=io.StringIO(), force_terminal=terminal, color_system=None)
        LiveView("runs/x", 200, console=console).info("size tiny: " + "the colors of a class " * 9)
        assert len(console.file.getvalue().splitlines()) == lines


def test_facts_without_rows():
    assert str(facts_text({})) == ""
    assert str(facts_text({"data": ""})) == "data"


def test_trained_weights_stand_beside_their_average():
    view = LiveView("runs/x", 200, console=Console(file=io.StringIO()))
    view.update({"step": 10, "diversity": 0.9, "batch_diversity": 0.81, "spread": 1.1, "batch_spread": 1.25})
    assert re.search(r"diversity +0.9 .*in a class; data: 1; live 0.81", shown(view))
    assert re.search(r"spread +1.1 .*all samples; data: 1; live 1.25", shown(view))
    assert max(map(len, shown(view).splitlines())) <= 80
