"""A call that is refused in one line, another Python process and its memory: what many tests use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from driftgen.errors import InputError

ROOT = Path(__file__).parents[2]


def fails(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def child(code, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], env=environment, text=True, **options
    )


def peak():
    """Most memory that this process has held, in bytes. ``ru_maxrss`` would begin with its parent's."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
