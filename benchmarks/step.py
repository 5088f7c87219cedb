"""One whole training step of the paper's ablation configuration on synthetic latents: seconds and memory.

    python -m benchmarks.step [--classes 8] [--micro 1 2 4] [--mode exact previous] [--compile] [--out FILE]

Random weights, bfloat16: generator, encoder of generated (with gradient) and real samples, drifting loss,
clipping, AdamW, EMA. The authors' own code was measured at 0.560 s and 127 GiB with 8 classes on one H200.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import driftgen as dg
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators import DiT
from driftgen.guidance import sample_alpha
from driftgen.report.toy import provenance
from driftgen.training.config import Optimizer
from driftgen.training.ema import Averages
from driftgen.training.optimizer import clip, make_optimizer
from driftgen.training.step import Drawn, DriftStep

RELEASE = {8: (0.560, 127.0)}  # seconds and GiB of the authors' JAX code, by classes


def measure(args: argparse.Namespace, micro: int, mode: Any, repeats: int) -> dict[str, Any]:
    """Median seconds of a step, and the most memory."""
    device, latent = torch.device(args.device), (4, 32, 32)
    torch.manual_seed(0)
    generator = DiT.preset("B/2", depth=args.depth, attention_float32=args.attention_float32).to(device)
    mae = ResNetMAE(4, args.base, decoder=False).to(device)
    phi = FeatureStack([mae])
    if args.channels_last:
        phi.to(memory_format=torch.channels_last)
    model = torch.compile(generator) if args.compile else generator
    step = DriftStep(
        model,
        phi,
        dg.DriftingLoss(),
        generated=args.generated,
        micro=micro,
        mode=mode,
        autocast=torch.bfloat16,
    )
    if args.compile:
        step.encode = torch.compile(phi.features)
    optimizer = make_optimizer(generator.parameters(), Optimizer())
    averages = Averages(generator, [0.999])
    classes = args.classes
    times, cold = [], 0.0
    for i in range(repeats + 2):
        drawn = Drawn(
            torch.randint(1000, (classes,), device=device),
            sample_alpha(classes).to(device),
            generator.sample_noise(classes * args.generated),
            torch.randn(classes, args.positives, *latent, device=device),
            torch.randn(classes, args.unconditional, *latent, device=device),
        )
        if i == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        start = time.perf_counter()
        optimizer.zero_grad()
        out = step(drawn)
        clip(generator.parameters(), 2.0)
        optimizer.step()
        averages.update(generator)
        _wait(device)
        times.append(time.perf_counter() - start)
        cold = cold or times[0]
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    row = {
        "classes": classes,
        "micro": micro,
        "mode": mode,
        "compiled": args.compile,
        "seconds": sorted(times[2:])[repeats // 2],
        "first_step_seconds": cold,
        "memory_gib": memory,
        "loss": out.loss.item(),
    }
    print(json.dumps(row), flush=True)
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--generated", type=int, default=64)
    parser.add_argument("--positives", type=int, default=64)
    parser.add_argument("--unconditional", type=int, default=16)
    parser.add_argument("--micro", type=int, nargs="+", default=[1])
    parser.add_argument("--mode", nargs="+", default=["exact"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument(
        "--attention-float32", action="store_true", help="as the ablation configuration has it"
    )
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--base", type=int, default=256, help="width of the encoder's first stage")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for mode in args.mode:
        for micro in args.micro:
            try:
                rows.append(measure(args, micro, mode, args.repeats))
            except torch.cuda.OutOfMemoryError:
                rows.append({"classes": args.classes, "micro": micro, "mode": mode, "memory": "does not fit"})
                print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
    if args.out:
        arguments = {k: v for k, v in vars(args).items() if k != "out"}
        release = dict(zip(("seconds", "memory_gib"), RELEASE.get(args.classes, (None, None)), strict=True))
        gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
        record = {
            **provenance("python -m benchmarks.step"),
            "gpu": gpu,
            "arguments": arguments,
            "release": release,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
