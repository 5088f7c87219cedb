"""How attention is best built: time of each way by blocks, warps and registers, against ``qk_norm_rope`` and
PyTorch's attention.

    python -m benchmarks.attention [--batch 512] [--tokens 272] [--heads 12] [--head 64] [--float32]
                                   [--json FILE]

On a GPU, bfloat16; with ``--float32`` nothing between queries, keys, values and the result is rounded. Errors
are those of the gradients relative to the ones through PyTorch's attention: a few thousandths. The fastest
builds are what ``FORWARD`` and ``BACKWARD`` of ``driftgen.ops.attention`` should say.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.results import save
from driftgen.generators.dit import rope_tables
from driftgen.ops import attention as ours
from driftgen.ops.qk_norm_rope import qk_norm_rope

EVALUATOR = (
    "milliseconds of a call: median of batches of 10 queued ones; errors against PyTorch's attention of the "
    "result and the gradients of qkv and the two norms' weights"
)
CALLS = 10  # queued at a time, so that the GPU does not wait for the host

FORWARD: list[dict[str, Any]] = [
    {"BQ": 64, "BK": 64, "num_warps": 4, "maxnreg": 168},
    {"BQ": 64, "BK": 64, "num_warps": 4, "maxnreg": None},
    {"BQ": 64, "BK": 128, "num_warps": 4, "maxnreg": 168},
    {"BQ": 128, "BK": 128, "num_warps": 8, "maxnreg": None},
]
BACKWARD: list[dict[str, Any]] = [
    {"ROWS": 64, "BK": 64, "BQ": 32, "STAGES": 4, "num_warps": 4, "maxnreg": None},
    {"ROWS": 64, "BK": 64, "BQ": 64, "STAGES": 3, "num_warps": 4, "maxnreg": None},
    {"ROWS": 64, "BK": 64, "BQ": 64, "STAGES": 2, "num_warps": 4, "maxnreg": None},
    {"ROWS": 64, "BK": 64, "BQ": 64, "STAGES": 4, "num_warps": 4, "maxnreg": None},
    {"ROWS": 64, "BK": 64, "BQ": 64, "STAGES": 3, "num_warps": 4, "maxnreg": 168},
    {"ROWS": 64, "BK": 64, "BQ": 32, "STAGES": 3, "num_warps": 4, "maxnreg": None},
    {"ROWS": 64, "BK": 128, "BQ": 64, "STAGES": 3, "num_warps": 4, "maxnreg": None},
    {"ROWS": 64, "BK": 32, "BQ": 32, "STAGES": 3, "num_warps": 4, "maxnreg": 168},
    {"ROWS": 128, "BK": 64, "BQ": 64, "STAGES": 3, "num_warps": 8, "maxnreg": None},
]


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Of a call: the median over batches of calls that follow one another, after one such batch."""
    times = []
    for _ in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(CALLS):
            function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / CALLS)
    return statistics.median(times[1:])


def through_pytorch(*inputs: Any, float32: bool = False) -> Tensor:
    heads = qk_norm_rope(*inputs)
    if float32:
        mixed = F.scaled_dot_product_attention(*(t.float() for t in heads)).to(heads[0].dtype)
    else:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            mixed = F.scaled_dot_product_attention(*heads)
    return mixed.transpose(1, 2).flatten(2)


def error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.detach().float(), wanted.float()
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=272)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--head", type=int, default=64)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    width = args.heads * args.head
    tables = rope_tables(args.tokens, args.head, torch.device("cuda"))
    leaves = [
        torch.randn(args.batch, args.tokens, 3 * width, device="cuda", dtype=torch.bfloat16),
        *(1 + 0.1 * torch.randn(args.head, device="cuda") for _ in range(2)),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.randn(args.batch, args.tokens, width, device="cuda", dtype=torch.bfloat16)
    wanted: tuple[Tensor, ...] = ()
    rows: list[dict[str, Any]] = []

    def measure(name: str, function: Callable[..., Tensor], build: dict[str, Any]) -> None:
        row: dict[str, Any] = {"name": name, **build}
        try:
            out = function(*leaves, *tables, args.heads, float32=args.float32)
            found = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
            if wanted:
                row["errors"] = [error(a, b) for a, b in zip((out, *found), wanted, strict=True)]
            with torch.enable_grad():
                row["forward"] = milliseconds(
                    lambda: function(*leaves, *tables, args.heads, float32=args.float32), args.repeats
                )
            row["backward"] = milliseconds(
                lambda: torch.autograd.grad(out, leaves, upstream, retain_graph=True), args.repeats
            )
            row["found"] = (out.detach(), *found)
        except Exception as problem:  # such as too much shared memory: the sweep goes on
            row["error"] = str(problem)[:80]
        rows.append(row)

    measure("pytorch", through_pytorch, {})
    wanted = rows[0].pop("found", ())
    print(f"{'ms':>11} {'forward':>8} {'backward':>8}  largest error  build")
    for row in rows:
        show(row)
    with torch.no_grad():
        took = milliseconds(
            lambda: ours.attention(*leaves, *tables, args.heads, float32=args.float32), args.repeats
        )
    rows.append({"name": "no gradient", "forward": took})
    show(rows[-1])
    for forward in FORWARD:
        ours.FORWARD = forward
        measure("forward", ours.attention, forward)
        show(rows[-1])
    ours.FORWARD = FORWARD[0]
    for backward in BACKWARD:
        ours.BACKWARD = backward
        measure("backward", ours.attention, backward)
        show(rows[-1])
    shape = [args.batch, args.tokens, args.heads, args.head]
    save(args.json, EVALUATOR, {"shape": shape, "rows": rows})


def show(row: dict[str, Any]) -> None:
    row.pop("found", None)
    times = [f"{row[way]:8.3f}" if way in row else f"{'-':>8}" for way in ("forward", "backward")]
    largest = f"{max(row['errors']):13.4f}" if "errors" in row else " " * 13
    rest = {k: v for k, v in row.items() if k not in ("name", "forward", "backward", "errors")}
    print(f"{row['name']:>11} {times[0]} {times[1]}  {largest}  {rest}", flush=True)


if __name__ == "__main__":
    main()
