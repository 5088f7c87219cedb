"""Run the driftgen command in a second process."""

import subprocess
import sys

DRIFTGEN = [sys.executable, "-m", "driftgen"]


def run(*words, **options):
    return subprocess.run(
        [*DRIFTGEN, *map(str, words)], capture_output=True, text=True, check=False, **options
    )
