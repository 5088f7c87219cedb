"""Time the GPU kernels with other block sizes, warps, pipeline stages and registers.

    python -m benchmarks.tune attention [--float32] [--json FILE]
    python -m benchmarks.tune group-norm [--samples 512] [--channels 256] [--side 32] [--json FILE]
    python -m benchmarks.tune loss [--groups 16384] [--width 256] [--json FILE]
    python -m benchmarks.tune tiles [--generated 640 --positives 640 --unconditional 0] [--widths 64 256 1024]
        [--only strip_products gradient] [--groups 64] [--json FILE]

Needs an NVIDIA GPU; all maps and features are bfloat16. Copy the fastest values to ``FORWARD`` and
``BACKWARD`` of ``driftgen.ops.attention``, to ``MAX_ELEMENTS`` of ``driftgen.ops.group_norm``, to ``BUILD``
of ``driftgen.drift.fused.shapes``, or to ``TILES`` of ``driftgen.drift.fused.tile_sizes``; ``tiles`` prints
its rows as they are written there.
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
QUEUE_CYCLES = 20_000_000  # about 10 ms, in which the host queues a call of the loss
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
TILE_FIELDS = ("rows", "columns", "inner", "outer", "strips", "warps", "stages", "registers", "one_sweep")
STRIP_WRITERS = [
    (64, 64, 64, 64, False, 4, 3, 128),
    (64, 64, 64, 64, False, 4, 3, 168),
    (64, 64, 128, 64, False, 4, 2, 128),
    (64, 64, 256, 64, False, 4, 2, 168),
    (64, 128, 64, 64, False, 8, 3, 128),
]
# In an order in which each kernel finds the best tiles of those before it. An inner size of 256 stands for
# whole samples. The last field may be left out.
TILE_CANDIDATES: dict[str, list[tuple[int | bool | None, ...]]] = {
    "center": [(rows, 64, 64, 64, False, warps, 3, None) for rows, warps in ((32, 4), (64, 8), (128, 8))],
    "norms": [(64, 64, 64, 64, False, 4, 3, None), (64, 64, 128, 64, False, 4, 2, None)],
    "scale": [
        (64, 128, 64, 64, False, 4, 3, None),
        (64, 64, 64, 64, False, 4, 3, 128),
        (128, 128, 64, 64, False, 8, 3, None),
        (128, 64, 64, 64, False, 8, 3, 128),
        (64, 64, 256, 64, False, 4, 2, None),
        (128, 64, 256, 64, False, 4, 2, None),
        (128, 64, 256, 64, False, 8, 2, None),
    ],
    "softmax": [
        (64, 64, 64, 64, False, 4, 3, 128),
        (64, 128, 64, 64, False, 8, 3, 128),
        (128, 128, 64, 64, False, 8, 3, None),
        (128, 128, 64, 64, False, 8, 3, None, True),
        (128, 64, 64, 64, False, 8, 3, None, True),
        (64, 128, 64, 64, False, 8, 3, None, True),
        (64, 64, 64, 64, False, 4, 3, 168, True),
        (64, 64, 256, 64, False, 4, 2, None),
        (64, 64, 256, 64, False, 4, 2, 168),
        (128, 64, 256, 64, False, 8, 2, None),
    ],
    "affinity_strips": STRIP_WRITERS,
    "strip_products": [
        (64, 64, 64, 64, False, 4, 3, None),
        (64, 64, 32, 64, False, 4, 5, None),
        (64, 64, 64, 128, False, 8, 3, None),
    ],
    "products": [
        *[(64, columns, 64, 64, False, 8, 3, None) for columns in (32, 64)],
        (64, 64, 64, 64, True, 4, 3, None),
    ],
    "gradient_strips": STRIP_WRITERS,
    "strip_gradient": [
        (64, 64, 64, 64, False, 4, 3, None),
        (64, 64, 64, 128, False, 4, 3, None),
        (64, 64, 32, 128, False, 4, 5, None),
    ],
    "gradient": [
        (64, 32, 256, 64, False, 4, 2, None),
        (64, 32, 256, 64, False, 4, 3, None),
        (64, 64, 256, 64, False, 4, 2, None),
        (128, 32, 256, 64, False, 8, 2, None),
        (64, 64, 64, 64, False, 8, 3, None),
        (64, 64, 64, 64, True, 4, 3, None),
    ],
}
WIDEST_SWEEPS = {"products": 128, "gradient": 256}  # wider drifts of whole rows do not fit the registers
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


def kernel_times(loss: dg.DriftingLoss, sets: list[Tensor], repeats: int) -> dict[str, float]:
    """Return the milliseconds of each kernel in a call of the loss and its gradient: the median, after two
    calls, of the sum over launches.

    The GPU waits until a call is queued. A launch on an idle GPU would take some 30 microseconds longer,
    which is more than many of these kernels need.
    """
    from driftgen.ops.launch import Launch

    real = Launch.__call__
    calls: list[dict[str, float]] = []
    events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def call(self: Launch, *tensors: Tensor) -> None:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        real(self, *tensors)
        stop.record()
        events.append((self.kernel.__name__, start, stop))

    Launch.__call__ = call  # type: ignore[method-assign]
    try:
        for _ in range(repeats + 2):
            events.clear()
            torch.cuda._sleep(QUEUE_CYCLES)
            torch.autograd.grad(loss(*sets).loss, sets[0])
            torch.cuda.synchronize()
            calls.append({})
            for name, start, stop in events:
                calls[-1][name] = calls[-1].get(name, 0.0) + start.elapsed_time(stop)
    finally:
        Launch.__call__ = real  # type: ignore[method-assign]
    return {name: statistics.median(each[name] for each in calls[2:]) for name in calls[-1]}


def draw_sets(groups: int, sizes: tuple[int, ...], width: int) -> list[Tensor]:
    """Draw generated samples, positives and, if there are any, negatives."""
    sets = [torch.randn(groups, n, width, device="cuda", dtype=torch.bfloat16) for n in sizes if n]
    sets[0].requires_grad_()
    return sets


def tune_loss(args: argparse.Namespace) -> Iterator[Build]:
    """Time each kernel of the loss by tile width, warps, pipeline stages and registers."""
    from driftgen.drift.fused import shapes

    sets = draw_sets(args.groups or 16384, (64, 64, 16), args.width)
    for tile, warps, stages, registers in itertools.product((32, 64, 128), (4, 8), (1, 2, 3), args.registers):
        build = {"BK": tile, "num_warps": warps, "num_stages": stages, "maxnreg": registers or None}
        shapes.BUILD = dict.fromkeys(shapes.BUILD, build)
        # A new loss has launches of its own.
        yield build | attempt(lambda: kernel_times(dg.DriftingLoss(), sets, args.repeats))


def tune_tiles(args: argparse.Namespace) -> Iterator[Build]:
    """Time the kernels for large groups with other tiles, one kernel at a time, and print the fastest rows.

    All candidates are compiled in parallel first. Later kernels use the fastest tiles of earlier ones, so
    that sweeps and strips are compared at their best.
    """
    from driftgen.drift.batching import as_features, buckets_by_width
    from driftgen.drift.fused import tile_sizes
    from driftgen.drift.fused.plan import make_plan
    from driftgen.drift.fused.tile_sizes import STRIPS, Tile
    from driftgen.drift.interfaces import LossCall
    from driftgen.ops.launch import Launch

    sizes = args.generated, args.positives, args.unconditional
    usual, prepare = dict(tile_sizes.TILES), Launch.prepare
    by_strips = {name: kernel for kernel, names in STRIPS.items() for name in names}
    kernels, best = args.only or list(TILE_CANDIDATES), dict[str, list[tuple[float, Tile]]]()

    def start(sets: list[Tensor]) -> dg.DriftingLoss:
        """Start to compile the kernels of a loss, and return it."""
        loss, buckets = dg.DriftingLoss(), buckets_by_width(*as_features(*sets, *[None] * (3 - len(sets))))
        make_plan(LossCall(loss.settings, buckets, None, None, True))
        return loss

    def plan(kernel: str, sets: list[Tensor], fastest: dict[str, Any]) -> list[tuple[Tile, dg.DriftingLoss]]:
        """Start to compile the candidates of a kernel, and return them with a loss for each."""
        width, others, planned = sets[0].shape[-1], dict(fastest), []
        if kernel in by_strips:
            others[by_strips[kernel]] = (Tile(strips=True),)
        Launch.prepare = lambda self, *dtypes: (  # type: ignore[method-assign]
            prepare(self, *dtypes) if kernel in self.kernel.__name__ else None
        )
        for values in TILE_CANDIDATES[kernel]:
            given: dict[str, Any] = dict(zip(TILE_FIELDS, values, strict=False))
            tile = Tile(**given, from_width=width)
            if (not tile.strips and width > WIDEST_SWEEPS.get(kernel, width)) or 128 < tile.inner < width:
                continue
            tile_sizes.TILES = others | {kernel: (tile,)}
            planned.append((tile, start(sets)))
        Launch.prepare, tile_sizes.TILES = prepare, usual  # type: ignore[method-assign]
        return planned

    sets_of_width = [draw_sets(args.groups or 64, sizes, width) for width in args.widths]
    for sets in sets_of_width:
        start(sets)
        for kernel in kernels:
            plan(kernel, sets, usual)
    for width, sets in zip(args.widths, sets_of_width, strict=True):
        fastest = dict(usual)
        for kernel in kernels:
            timed = []
            for tile, loss in plan(kernel, sets, fastest):
                times = attempt(lambda loss=loss, sets=sets: kernel_times(loss, sets, args.repeats))
                if "error" not in times:
                    # The sum: strips take more kernels than sweeps, and their sizes affect each other.
                    timed.append((sum(times.values()), tile))
                yield {
                    "width": width,
                    "kernel": kernel,
                    **dict(zip(TILE_FIELDS, fields(tile), strict=True)),
                } | times
            if timed:
                best.setdefault(kernel, []).append(min(timed, key=lambda pair: pair[0]))
                fastest[kernel] = (best[kernel][-1][1],)
    for kernel, rows in best.items():
        print(f'    "{kernel}": (')
        for total, tile in rows:
            named = zip((*TILE_FIELDS, "from_width"), (*fields(tile), tile.from_width), strict=True)
            print(f"        Tile({', '.join(f'{n}={v}' for n, v in named)}),  # {total:.3f} ms in all")
        print("    ),", flush=True)


def fields(tile: Any) -> list[Any]:
    return [getattr(tile, name) for name in TILE_FIELDS]


def attempt(measure: Callable[[], Build]) -> Build:
    """Measure, or return the error, such as too much shared memory, so that the sweep continues."""
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
    parser.add_argument("kernel", choices=["attention", "group-norm", "loss", "tiles"])
    sizes = {"batch": 512, "tokens": 272, "heads": 12, "head": 64, "samples": 512, "channels": 256}
    for name, default in (sizes | {"side": 32, "width": 256, "repeats": 5}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--groups", type=int, help="groups of the loss; 16384, or 64 large ones")
    for name, default in {"generated": 640, "positives": 640, "unconditional": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="samples of a large group")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--only", nargs="+", choices=list(TILE_CANDIDATES), help="kernels for large groups")
    parser.add_argument("--float32", action="store_true", help="attention without rounding in between")
    parser.add_argument("--registers", type=int, nargs="+", default=[0], help="registers per thread; 0: any")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.tune needs an NVIDIA GPU")
    sweeps = {
        "attention": tune_attention,
        "group-norm": tune_group_norm,
        "loss": tune_loss,
        "tiles": tune_tiles,
    }
    rows = []
    for row in sweeps[args.kernel](args):
        rows.append(row)
        print(json.dumps(row), flush=True)
    save(args.json, EVALUATOR, {"arguments": vars(args) | {"json": None}, "rows": rows})


if __name__ == "__main__":
    main()
