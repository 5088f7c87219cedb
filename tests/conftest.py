import os
import subprocess
import sys

import pytest
import torch
from hypothesis import settings

# Without a GPU its kernels run statement by statement; Triton reads this when it is imported, as it may be
# with driftgen.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

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
def _as_in_a_new_process():
    torch.manual_seed(0)
    # On a CPU without bfloat16 the first such product turns oneDNN off for the rest of the process,
    # after which float32 results differ in the last digit from those of another process.
    torch.backends.mkldnn.set_flags(True)


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs a command in this process: what ``run`` does, without the two seconds to import torch."""
    from driftgen.cli import main

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["driftgen", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return subprocess.CompletedProcess(words, left.value.code, *capsys.readouterr())

    return call
