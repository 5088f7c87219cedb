"""Time the host's part of a sampling call: noise of a batch by number of threads, and copies of results.

python tools/goes/noise_times.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from driftgen.generators.row_draws import draw_rows

SHAPE = (4, 32, 32)


def main() -> None:
    """Print milliseconds, medians of 20."""
    for rows in (32, 64, 128, 256):
        gaussian, style = torch.empty(rows, *SHAPE), torch.empty(rows, 32, dtype=torch.int64)
        times = []
        for threads in (1, 4, 8, torch.get_num_threads()):
            times.append(f"{threads} threads {_median(_draw(gaussian, style, threads)):.2f}")
        stream = torch.empty(rows * (gaussian[0].numel() + 32), dtype=torch.int32)
        skip, clone = _median(stream.random_), _median(gaussian.clone)
        print(f"{rows} rows: {', '.join(times)}; stream alone {skip:.2f}, copy {clone:.2f} ms")


def _draw(gaussian: torch.Tensor, style: torch.Tensor, threads: int) -> Callable[[], None]:
    return lambda: draw_rows(gaussian, style, 64, torch.Generator().manual_seed(0), threads)


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


if __name__ == "__main__":
    main()
