"""Assert a one-line error, start a Python process, measure peak memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from driftgen.errors import InputError

ROOT = Path(__file__).parents[2]


def fails(call, message):
    """Assert that the call raises an InputError of one line that matches ``message``."""
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def child(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True, **options
    )


def peak():
    """Return the peak memory of this process in bytes. ``ru_maxrss`` would include the parent's peak."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
