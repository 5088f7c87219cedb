"""Images per second and peak memory of one-step sampling, and one training step of each preset, on a GPU.

    python -m benchmarks.sampling [--presets B/2 L/2] [--batches 64 256] [--json results.json]

Random weights in bfloat16; eager and compiled in the same run. For the release's figures see its measurements
in the record.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import driftgen as dg

# Images per second of the authors' JAX code on one H200, random weights, bf16 (JAX 0.11.2).
RELEASE = {("B/2", 64): 4924.0, ("B/2", 256): 5469.0}


def measure(step: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of one step (mean over the repeats) and peak GiB."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats, torch.cuda.max_memory_allocated() / 2**30


def sampling(preset: str, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    """Rows for one generator: eager and compiled at each batch."""
    rows = []
    net = dg.generators.DiT.preset(preset).cuda().bfloat16().eval()
    compiled = torch.compile(net)
    for batch in batches:
        noise = net.sample_noise(batch)
        labels, alpha = torch.zeros(batch, dtype=torch.int64, device="cuda"), torch.ones(batch, device="cuda")
        for mode, call in (("eager", net), ("compiled", compiled)):
            start = time.perf_counter()
            with torch.inference_mode():
                call(noise, labels, alpha)
                torch.cuda.synchronize()
                first = time.perf_counter() - start
                seconds, peak = measure(functools.partial(call, noise, labels, alpha), repeats)
            row = {
                "what": f"sample {preset}",
                "mode": mode,
                "batch": batch,
                "images_per_second": batch / seconds,
            }
            rows.append(
                {**row, "peak_gib": peak, "first_call_s": first, "release": RELEASE.get((preset, batch))}
            )
    return rows


def training(name: str, net: torch.nn.Module, run: Callable[[], torch.Tensor], batch: int) -> dict[str, Any]:
    """One forward and backward pass in bf16 autocast, eager."""

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run()
        net.zero_grad(set_to_none=True)
        loss.backward()

    seconds, peak = measure(step, 3)
    row = {"what": f"train {name}", "mode": "eager", "batch": batch, "images_per_second": batch / seconds}
    return {**row, "peak_gib": peak, "first_call_s": None, "release": None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--presets", nargs="+", default=["B/2", "L/2"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--training", action="store_true", help="also a training step of every preset and of MAE-256"
    )
    parser.add_argument("--json", type=Path, help="also write the table here")
    args = parser.parse_args()
    rows = [row for preset in args.presets for row in sampling(preset, args.batches, args.repeats)]
    if args.training:
        for preset in ("B/2", "L/2", "B/16", "L/16"):
            net = dg.generators.DiT.preset(preset).cuda()
            noise, labels = net.sample_noise(32), torch.zeros(32, dtype=torch.int64, device="cuda")
            rows.append(
                training(preset, net, lambda n=net, e=noise, c=labels: n(e, c, 1.5).float().mean(), 32)
            )  # type: ignore[misc]
            del net
        mae = dg.features.ResNetMAE.preset("latent-256").cuda()
        images = torch.randn(32, 4, 32, 32, device="cuda")
        rows.append(training("MAE latent-256", mae, lambda: mae.loss(images).loss, 32))
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("what", "mode", "batch", "images/s", "release", "ratio", "peak GiB", "first call s"):
        table.add_column(column, justify="left" if column in ("what", "mode") else "right")
    for row in rows:
        rate, release = row["images_per_second"], row["release"]
        against = (f"{release:.0f}", f"{rate / release:.2f}x") if release else ("", "")
        first = "" if row["first_call_s"] is None else f"{row['first_call_s']:.1f}"
        table.add_row(
            row["what"],
            row["mode"],
            str(row["batch"]),
            f"{rate:.0f}",
            *against,
            f"{row['peak_gib']:.1f}",
            first,
        )
    Console(width=110).print(table)
    if args.json:
        record = {"hardware": torch.cuda.get_device_name(), "torch": torch.__version__}
        record |= {"arguments": {k: v for k, v in vars(args).items() if k != "json"}, "rows": rows}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
