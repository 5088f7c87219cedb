"""Seconds to import driftgen beside importing torch alone, each in fresh processes.

python -m benchmarks.startup
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time


def seconds(code: str, repeats: int = 5) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    seconds("import torch", 1)  # fills the file cache
    torch, driftgen = seconds("import torch"), seconds("import driftgen")
    for name, value in (("import torch", torch), ("import driftgen", driftgen), ("more", driftgen - torch)):
        print(f"{name:16s}{value:.2f} s")


if __name__ == "__main__":
    main()
