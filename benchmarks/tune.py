"""Time the GPU kernels with other block sizes, warps, pipeline stages and registers.

    python -m benchmarks.tune attention [--float32] [--json FILE]
    python -m benchmarks.tune group-norm [--samples 512] [--channels 256] [--side 32] [--json FILE]
    python -m benchmarks.tune loss [--groups 16384] [--width 256] [--json FILE]

Needs an NVIDIA GPU; all maps and features are bfloat16. Copy the fastest values to ``FORWARD`` and
``BACKWARD`` of ``driftgen.ops.attention``, to ``MAX_ELEMENTS`` of
``driftgen.ops.group_norm``, or to ``BUILD`` of ``driftgen.drift.fused.shapes``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import driftgen as dg
from driftgen.support.atomic_write import atomic_write
from driftgen.support.provenance import provenance

CALLS = 10  # queued at a time, so that the GPU does not wait for the host
EVALUATOR = "milliseconds per call: median of batches of 10 queued calls, after one such batch"
Build = dict[str, Any]
ATTENTION_FORWARD: list[Build] = [
    {"BQ": 64, "BK": 64, "num_warps": 4, "maxnreg": 168},
    {"BQ": 64, "BK": 64, "num_warps": 4, "maxnreg": None},
    {"BQ": 64, "BK": 128, "num_warps": 4, "maxnreg": 168},
    {"BQ": 128, "BK": 128, "num_warps": 8, "maxnreg": None},
]
# ROWS, BK, BQ, STAGES, num_warps, maxnreg
ATTENTION_BACKWARD: list[Build] = [
    dict(zip(("ROWS", "BK", "BQ", "STAGES", "num_warps", "maxnreg"), values, strict=True))
    for values in (
        (64, 64, 32, 4, 4, None),
        (64, 64, 64, 3, 4, None),
        (64, 64, 64, 2, 4, None),
        (64, 64, 64, 4, 4, None),
        (64, 64, 64, 3, 4, 168),
        (64, 64, 32, 3, 4, None),
        (64, 128, 64, 3, 4, None),
        (64, 32, 32, 3, 4, 168),
        (128, 64, 64, 3, 8, None),
    )
]
GROUP_NORM: list[Build] = [{"MAX_ELEMENTS": 2**n} for n in (12, 13, 14)]


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Return the time per call: the median over batches of queued calls, after one such batch."""
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


def tune_attention(args: argparse.Namespace) -> Iterator[Build]:
    """Time builds of attention; ``errors`` are relative to PyTorch's result and gradients."""
    from driftgen.ops import attention as ours
    from driftgen.ops.dispatch import without_kernels
    from driftgen.ops.rope import rope_tables

    width = args.heads * args.head
    tables = rope_tables(args.tokens, args.head, torch.device("cuda"))
    leaves = [
        torch.randn(args.batch, args.tokens, 3 * width, device="cuda", dtype=torch.bfloat16),
        *(1 + 0.1 * torch.randn(args.head, device="cuda") for _ in range(2)),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    upstream = torch.randn(args.batch, args.tokens, width, device="cuda", dtype=torch.bfloat16)
    expected: tuple[Tensor, ...] = ()

    def pytorch(qkv: Tensor, query: Tensor, key: Tensor, *rest: Any, float32: bool) -> Tensor:
        cos, sin, heads = rest
        norms = ours.HeadNorm(query), ours.HeadNorm(key)
        kinds = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
        with without_kernels(), sdpa_kernel(kinds, set_priority=True):
            return ours.attention(qkv, heads, *norms, (cos, sin), float32)

    def measure(function: Callable[..., Tensor]) -> Build:
        nonlocal expected

        def forward() -> Tensor:
            return function(*leaves, *tables, args.heads, float32=args.float32)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

        out = forward()
        results = (out.detach(), *backward())
        expected = expected or results
        return {
            "errors": [relative_error(a, b) for a, b in zip(results, expected, strict=True)],
            "forward": milliseconds(forward, args.repeats),
            "backward": milliseconds(backward, args.repeats),
        }

    yield {"name": "pytorch"} | measure(pytorch)
    usual = ours.FORWARD, ours.BACKWARD
    for name, builds in (("FORWARD", ATTENTION_FORWARD), ("BACKWARD", ATTENTION_BACKWARD)):
        for build in builds:
            setattr(ours, name, build)
            yield {"name": name, **build} | attempt(lambda: measure(ours.fused_attention))
        ours.FORWARD, ours.BACKWARD = usual


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def tune_group_norm(args: argparse.Namespace) -> Iterator[Build]:
    """Time builds of the group norm with ReLU."""
    from driftgen.ops import group_norm as ours

    shape = args.samples, args.channels, args.side, args.side

    def draw() -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)

    x, other, grad, y, x_grad, other_grad = (draw() for _ in range(6))
    weight, bias = torch.ones(args.channels, device="cuda"), torch.zeros(args.channels, device="cuda")
    statistics_buffer = torch.empty(args.samples, 2, 32, device="cuda")
    for build in GROUP_NORM:
        for name, value in build.items():
            setattr(ours, name, value)
        ours._launches.cache_clear()
        forward, backward = ours._launches(x.shape, 32, x.device, 1e-6, True)
        norm = x, weight, bias
        calls: dict[str, tuple[Callable[..., object], tuple[Any, ...]]] = {
            "forward": (forward, (*norm, None, y, statistics_buffer)),
            "forward with a sum": (forward, (*norm, other, y, statistics_buffer)),
            "backward": (backward, (*norm, None, grad, statistics_buffer, x_grad, None)),
            "backward with a sum": (backward, (*norm, y, grad, statistics_buffer, x_grad, other_grad)),
        }
        yield build | {
            name: milliseconds(lambda c=call, t=tensors: c(*t), args.repeats)
            for name, (call, tensors) in calls.items()
        }


def tune_loss(args: argparse.Namespace) -> Iterator[Build]:
    """Time each kernel of the loss by tile width, warps, pipeline stages and registers."""
    from driftgen.drift.fused import shapes
    from driftgen.ops.launch import Launch

    real = Launch.__call__
    sets = [
        torch.randn(args.groups, n, args.width, device="cuda", dtype=torch.bfloat16) for n in (64, 64, 16)
    ]
    sets[0].requires_grad_()

    def measure() -> dict[str, float]:
        times: dict[str, list[float]] = {}

        def call(self: Launch, *tensors: Tensor) -> None:
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            real(self, *tensors)
            stop.record()
            stop.synchronize()
            times.setdefault(self.kernel.__name__, []).append(start.elapsed_time(stop))

        Launch.__call__ = call  # type: ignore[method-assign]
        try:
            for _ in range(args.repeats + 2):
                torch.autograd.grad(dg.DriftingLoss()(*sets).loss, sets[0])
        finally:
            Launch.__call__ = real  # type: ignore[method-assign]
        return {name: statistics.median(each[2:]) for name, each in times.items()}

    for tile, warps, stages, registers in itertools.product((32, 64, 128), (4, 8), (1, 2, 3), args.registers):
        build = {"BK": tile, "num_warps": warps, "num_stages": stages, "maxnreg": registers or None}
        shapes.BUILD = dict.fromkeys(shapes.BUILD, build)
        shapes._shape.cache_clear()  # the launches are cached with the shapes
        yield build | attempt(measure)


def attempt(measure: Callable[[], Build]) -> Build:
    """Measure, or return the error, such as too much shared memory, so that the sweep goes on."""
    try:
        return measure()
    except Exception as error:
        return {"error": str(error)[:80]}


def save(path: Path | None, evaluator: str, record: Mapping[str, Any]) -> None:
    """Write the record with the command, versions, hardware and evaluator to a file; None writes nothing."""
    if path is None:
        return
    program, *given = sys.argv
    options = [path.name if option == str(path) else option for option in given]
    command = shlex.join(["python", "-m", f"benchmarks.{Path(program).stem}", *options])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    whole = {**provenance(command), "gpu": gpu, "evaluator": evaluator, **record}
    with atomic_write(path) as scratch:
        scratch.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", choices=["attention", "group-norm", "loss"])
    sizes = {"batch": 512, "tokens": 272, "heads": 12, "head": 64, "samples": 512, "channels": 256}
    for name, default in (sizes | {"side": 32, "groups": 16384, "width": 256, "repeats": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--float32", action="store_true", help="attention without rounding in between")
    parser.add_argument("--registers", type=int, nargs="+", default=[0], help="registers per thread; 0: any")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.tune needs an NVIDIA GPU")
    sweeps = {"attention": tune_attention, "group-norm": tune_group_norm, "loss": tune_loss}
    rows = []
    for row in sweeps[args.kernel](args):
        rows.append(row)
        print(json.dumps(row), flush=True)
    save(args.json, EVALUATOR, {"arguments": vars(args) | {"json": None}, "rows": rows})


if __name__ == "__main__":
    main()
