"""How the kernels of the loss are best built: time of each pass by warps, width of a tile, pipeline depth
and registers.

    python -m benchmarks.kernels [--groups 16384] [--width 256] [--registers 0 128 168] [--json FILE]

On a GPU, bfloat16, groups of 64 generated, 64 positives and 16 negatives. The fastest of each
kernel is what ``driftgen.drift.fused.shapes.BUILD`` should say.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch

import driftgen as dg
from benchmarks.results import save
from driftgen.drift.fused import shapes
from driftgen.ops.launch import Launch


def passes(groups: int, width: int, repeats: int) -> dict[str, float]:
    """Milliseconds of each kernel in one call and its gradient."""
    times: dict[str, list[float]] = {}
    real = Launch.__call__

    def call(self: Launch, *tensors: torch.Tensor) -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        real(self, *tensors)
        stop.record()
        stop.synchronize()
        times.setdefault(self.kernel.__name__, []).append(start.elapsed_time(stop))

    sets = [torch.randn(groups, n, width, device="cuda", dtype=torch.bfloat16) for n in (64, 64, 16)]
    sets[0].requires_grad_()
    Launch.__call__ = call  # type: ignore[method-assign]
    try:
        for _ in range(repeats + 2):
            torch.autograd.grad(dg.DriftingLoss()(*sets).loss, sets[0])
    finally:
        Launch.__call__ = real  # type: ignore[method-assign]
    return {name: sorted(found[2:])[repeats // 2] for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=16384)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warps", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--tile", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--registers", type=int, nargs="+", default=[0], help="most of a thread; 0: any")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for warps, tile, stages, most in itertools.product(args.warps, args.tile, args.stages, args.registers):
        build = {"BK": tile, "num_warps": warps, "num_stages": stages, "maxnreg": most or None}
        shapes.BUILD = dict.fromkeys(shapes.BUILD, build)
        shapes._shape.cache_clear()  # launches hang on shapes
        row: dict[str, Any] = dict(build)
        try:
            row |= passes(args.groups, args.width, args.repeats)
        except Exception as error:  # such as too much shared memory: the sweep goes on
            row["error"] = str(error)[:80]
        rows.append(row)
        print(json.dumps(row), flush=True)
    evaluator = "milliseconds of each kernel by itself, median of the repeats after two calls"
    save(args.json, evaluator, {"rows": rows})


if __name__ == "__main__":
    main()
