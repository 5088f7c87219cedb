"""Time and memory of DriftingLoss beside a plain literal implementation, in one run.

    python -m benchmarks.loss [--device cuda] [--base 256] [--json results.json]

The features are the 86 keys of the paper's latent encoder (12 maps with 7 keys each, the input's norm, the
sample itself), at a small width by default. The plain implementation makes one call per feature and
temperature and lets autograd do the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import driftgen as dg
from benchmarks.memory import Meter

TEMPERATURES = (0.02, 0.05, 0.2)
Features = dict[str, Tensor]


def shapes(base: int) -> dict[str, tuple[int, int]]:
    """Vectors and width of each of the 86 keys."""
    maps = {"conv1": (32, 1), "layer1": (32, 1), "layer1_blk2": (32, 1)}
    for stage, (size, blocks) in {2: (16, (2, 4)), 3: (8, (2, 4, 6)), 4: (4, (2,))}.items():
        for suffix in ("", *(f"_blk{b}" for b in blocks)):
            maps[f"layer{stage}{suffix}"] = (size, 2 ** (stage - 1))
    out = {"norm_x": (1, 4), "global": (1, 4096)}
    for name, (size, factor) in maps.items():
        for suffix, vectors in (("", size**2), ("_mean", 1), ("_std", 1)):
            out[name + suffix] = (vectors, base * factor)
        for patch in (2, 4):
            for statistic in ("mean", "std"):
                out[f"{name}_{statistic}_{patch}"] = ((size // patch) ** 2, base * factor)
    return out


def features(sizes: dict[str, tuple[int, int]], groups: int, samples: int, seed: int, to: dict) -> Features:
    generator = torch.Generator(to["device"]).manual_seed(seed)
    return {
        name: torch.randn(groups, samples, *shape, generator=generator, device=to["device"]).to(to["dtype"])
        for name, shape in sizes.items()
    }


def plain(generated: Features, positives: Features, negatives: Features) -> Tensor:
    """The released arithmetic, literally: every feature and every temperature by itself."""
    total = torch.zeros((), device=next(iter(generated.values())).device)
    for name, gen in generated.items():
        x, pos, neg = (
            s.float().transpose(1, 2).flatten(0, 1) for s in (gen, positives[name], negatives[name])
        )
        drift = torch.zeros_like(x)
        for temperature in TEMPERATURES:
            with torch.no_grad():
                v, unit = plain_drift(x, pos, neg, temperature)
                drift += v / v.square().mean().clamp(min=1e-8).sqrt()
        scaled = x / unit
        total = total + (scaled - (scaled + drift).detach()).square().mean()
    return total


def plain_drift(x: Tensor, pos: Tensor, neg: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    y, n = torch.cat([x, neg, pos], dim=1), x.shape[1]
    distance = torch.cdist(x, y).clamp(min=1e-4)
    scale = distance.mean()
    unit = (scale / x.shape[-1] ** 0.5).clamp(min=1e-3)
    logits = distance / scale.clamp(min=1e-3)
    logits = -(logits + 100 * torch.eye(n, y.shape[1], device=x.device)) / temperature
    affinity = (logits.softmax(-1) * logits.softmax(-2)).clamp(min=1e-6).sqrt()
    negative, positive = affinity.split([n + neg.shape[1], pos.shape[1]], dim=-1)
    coefficient = torch.cat([-negative * positive.sum(-1, True), positive * negative.sum(-1, True)], dim=-1)
    return (coefficient @ y - coefficient.sum(-1, keepdim=True) * x) / unit, unit


def measure(step: Callable[[], Tensor], repeats: int, device: str) -> dict[str, float]:
    """Seconds of the best of several steps, peak bytes beyond the inputs, and the loss."""
    loss = step().item()
    if device == "cuda":
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - held
    else:
        with Meter() as meter:
            step()
        peak = meter.peak
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return {"seconds": min(seconds), "peak_bytes": float(peak), "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--base", type=int, default=8, help="width of the first stage (256 in the paper)")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--generated", type=int, default=16)
    parser.add_argument("--positives", type=int, default=16)
    parser.add_argument("--negatives", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    sizes = shapes(args.base)
    to = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    generated, positives, negatives = (
        features(sizes, args.groups, n, seed, to)
        for seed, n in enumerate((args.generated, args.positives, args.negatives))
    )
    leaves = list(generated.values())
    for leaf in leaves:
        leaf.requires_grad_()

    def step(loss: Callable[..., Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            value = loss(generated, positives, negatives)
            torch.autograd.grad(value, leaves)
            return value.detach()

        return run

    def ours(chunk: int | None) -> Callable[..., Tensor]:
        return lambda *sets: dg.DriftingLoss(TEMPERATURES, chunk=chunk)(*sets).loss

    rows = {
        name: measure(step(loss), args.repeats, args.device)
        for name, loss in {
            "plain, one call per feature and temperature": plain,
            "driftgen.DriftingLoss": ours(None),
            "driftgen.DriftingLoss, chunk=512": ours(512),
        }.items()
    }
    first = next(iter(rows.values()))
    vectors = sum(v for v, _ in sizes.values())
    table = Table(title=f"{len(sizes)} features, {vectors} vectors a sample, forward + gradient")
    for column in ("implementation", "seconds", "speed", "peak MiB", "memory", "loss"):
        table.add_column(column, justify="left" if column == "implementation" else "right")
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['seconds']:.3f}",
            f"{first['seconds'] / row['seconds']:.2f}x",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row['peak_bytes'] / first['peak_bytes']:.2f}x",
            f"{row['loss']:.4f}",
        )
    Console().print(table)
    if args.json:
        hardware = (
            torch.cuda.get_device_name()
            if args.device == "cuda"
            else platform.processor() or platform.machine()
        )
        record = {
            "hardware": hardware,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "arguments": {k: v for k, v in vars(args).items() if k != "json"},
            "evaluator": "best of the repeats after a first call; peak of new allocations beyond the inputs",
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
