"""How the kernels of group norms are best built for maps that do not fit the registers of a program.

    python -m benchmarks.group_norm [--samples 512] [--channels 256] [--side 32] [--json FILE]

On a GPU, bfloat16, 32 groups, ReLU. Times of the forward and the backward pass, without and with a sum, by
warps, stages, channels of a program and numbers of a warp at a time. The fastest are what ``WARPS``,
``STAGES``, ``MOST_CHANNELS`` and ``NUMBERS_AT_A_TIME`` of ``driftgen.ops.group_norm`` should say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import milliseconds
from benchmarks.results import save
from driftgen.ops import group_norm as ours

BUILDS = [
    {"WARPS": 4, "STAGES": 3, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 4, "STAGES": 4, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 4, "STAGES": 6, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 2, "STAGES": 3, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 2, "STAGES": 6, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 8, "STAGES": 4, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 4, "STAGES": 4, "MOST_CHANNELS": 128, "NUMBERS_AT_A_TIME": 256},
    {"WARPS": 4, "STAGES": 3, "MOST_CHANNELS": 256, "NUMBERS_AT_A_TIME": 512},
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--channels", type=int, default=256)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape = args.samples, args.channels, args.side, args.side

    def draw() -> Tensor:
        drawn = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return drawn.to(memory_format=torch.channels_last)

    x, other, grad, y, of_x, of_other = (draw() for _ in range(6))
    weight, bias = torch.ones(args.channels, device="cuda"), torch.zeros(args.channels, device="cuda")
    kept = torch.empty(args.samples, 2, 32, device="cuda")
    rows: list[dict[str, Any]] = []
    for build in BUILDS:
        for name, value in build.items():
            setattr(ours, name, value)
        ours._launches.cache_clear()
        forward, backward = ours._launches(x.shape, 32, x.device, 1e-6, True)
        calls = {
            "forward": lambda: forward(x, weight, bias, None, y, kept),  # noqa: B023
            "forward with a sum": lambda: forward(x, weight, bias, other, y, kept),  # noqa: B023
            "backward": lambda: backward(x, weight, bias, None, grad, kept, of_x, None),  # noqa: B023
            "backward with a sum": lambda: backward(x, weight, bias, y, grad, kept, of_x, of_other),  # noqa: B023
        }
        rows.append(build | {name: milliseconds(call, 5) for name, call in calls.items()})
        print(json.dumps(rows[-1]), flush=True)
    save(
        args.json,
        "milliseconds of a call: median of batches of 10 queued ones",
        {"shape": shape, "rows": rows},
    )


if __name__ == "__main__":
    main()
