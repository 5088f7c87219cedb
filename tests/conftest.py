import os
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

# Without a GPU the kernels run in Triton's interpreter. Triton reads this variable when it is imported, which
# importing driftgen may do.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# CI uses the same examples every time; local runs explore new ones.
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
def _as_in_a_new_process():
    torch.manual_seed(0)
    # On a CPU without bfloat16 support the first bfloat16 product disables oneDNN for the rest of the
    # process. Afterwards float32 results differ in the last digit from those of another process.
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture
def here(capsys, monkeypatch):
    """Run a command in this process, without the two seconds that a new process needs to import torch."""
    from driftgen.cli import main

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["driftgen", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return subprocess.CompletedProcess(words, left.value.code, *capsys.readouterr())

    return call
