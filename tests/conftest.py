import os
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

from driftgen.cli import main

# Explore freely at the desk; in CI the same examples every time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs a command in this process: what ``run`` does, without the two seconds to import torch."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["driftgen", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return subprocess.CompletedProcess(words, left.value.code, *capsys.readouterr())

    return call
