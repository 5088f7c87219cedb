"""Ctrl-C while the command imports its libraries."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Receives SIGINT when it begins to import a module.
PROGRAM = """
import os, runpy, signal, sys

target = sys.argv.pop()

class Interrupt:
    def find_spec(self, name, path=None, module=None):
        if name == target:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[:] = ["driftgen", "train", "digits", "--device", "cpu"]
runpy.run_module("driftgen", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["driftgen.cli", "typer", "rich.console", "torch", "torch.cuda", "numpy"])
def test_it_ends_quietly(module, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "driftgen: interrupted\n")
    assert not list(tmp_path.iterdir())
