"""Assert a one-line error, measure peak memory."""

from pathlib import Path

import pytest

from driftgen.errors import InputError


def fails(call, message):
    """Assert that the call raises an InputError of one line that matches ``message``."""
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def peak():
    """Return the peak memory of this process in bytes. ``ru_maxrss`` would include the parent's peak."""
    line = next(row for row in Path("/proc/self/status").read_text().splitlines() if row.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
