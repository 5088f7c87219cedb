"""What one call of the loss and its gradient cost the host on a GPU machine, without a GPU.

    python -m benchmarks.host [--repeats 200] [--json FILE]

Kernels are compiled for a GPU and prepared as ever, but not launched: in place of the driver stands one that
does nothing. What PyTorch's own operations would launch is not in it. Where a GPU takes less time than this,
it waits for its host.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import driftgen as dg
from benchmarks.results import save
from driftgen.bench.loss_bench import Case
from driftgen.ops import dispatch


class NoLauncher:
    def __init__(self, source: Any, metadata: Any) -> None:
        pass

    def __call__(self, *arguments: Any) -> None:
        pass


class NoUtils:
    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        return 1, 2, 32, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class NoDriver:
    """Of an H200, as far as Triton asks."""

    utils, launcher_cls = NoUtils(), NoLauncher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Median seconds of a call and its gradient."""
    sets = case.draw(torch.bfloat16, torch.device("cpu"))
    leaves = [tensor.requires_grad_() for tensor in sets[0].values()]
    loss, seconds = dg.DriftingLoss(), []
    for _ in range(repeats + 5):
        start = time.perf_counter()
        torch.autograd.grad(loss(*sets).loss, leaves)
        seconds.append(time.perf_counter() - start)
    return {"what": case.name, "features": len(leaves), "seconds": statistics.median(seconds[5:])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    driver.set_active(NoDriver())
    dispatch.DEVICES = {"cpu"}
    # Nothing is computed, so nothing is finite; and on a GPU nobody asks.
    torch.Tensor.isfinite = lambda tensor: torch.ones((), dtype=torch.bool)  # type: ignore[method-assign, assignment]
    rows = []
    for case in (Case.single(4, 64, 64, 16, 512), Case.paper(8, 2, 16, 16, 4)):
        rows.append(measure(case, args.repeats))
        print(json.dumps(rows[-1]), flush=True)
    evaluator = "seconds of a call and its gradient, kernels not run: median of the repeats after five"
    save(args.json, evaluator, {"triton": triton.__version__, "rows": rows})


if __name__ == "__main__":
    main()
