import sys

import pytest
import torch

from driftgen.support.provenance import command_line, environment


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/usr/bin/driftgen", "train", "digits"], "driftgen train digits"),
        (["/site-packages/driftgen/__main__.py", "report", "my run"], "driftgen report 'my run'"),
        (["/other/__main__.py", "train"], ""),
        (["train.py", "--lr", "1"], ""),
    ],
)
def test_command_line(monkeypatch, words, expected):
    monkeypatch.setattr(sys, "argv", words)
    assert command_line() == expected


def test_environment_names_device_and_processes():
    about = environment(torch.device("cpu"), processes=4)
    assert (about["torch"], about["device"], about["processes"]) == (torch.__version__, "cpu", "4")
    assert "command" not in about
    assert "processes" not in environment(torch.device("cpu"))
