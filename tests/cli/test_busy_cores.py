"""Threads that wait soon stop to spin, so that a busy machine stays usable."""

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys
from driftgen.__main__ import main
assert "torch" not in sys.modules
sys.argv = ["driftgen", "--version"]
try:
    main()
except SystemExit:
    pass
print(os.environ.get("GOMP_SPINCOUNT"))
"""
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("chosen", "count"),
    [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_waiting_threads_spin_briefly_unless_the_user_says_otherwise(chosen, count):
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | chosen
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == count
