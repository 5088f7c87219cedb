"""The training step of a recipe for small images by the clock: the first one, those after it, and where their
time goes.

    python -m benchmarks.recipe [cifar10] [--set KEY=VALUE ...] [--steps 40] [--profile] [--json FILE]

Images, and the weights of the encoder that the recipe expects, are made up: neither changes the time. Caches
of the compiler (``TORCHINDUCTOR_CACHE_DIR``, ``TRITON_CACHE_DIR``) decide whether the start is a cold one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import save
from driftgen.bench.clock import find_device
from driftgen.bench.profiler import Phases, profile_step
from driftgen.features import ResNetMAE
from driftgen.model_io import save_model
from driftgen.training.config import TrainConfig
from driftgen.training.distributed import Distributed
from driftgen.training.ema import EMA
from driftgen.training.optimizer import clip, make_optimizer
from driftgen.training.recipes import load_recipe
from driftgen.training.trainer import Training


def make_up(folder: Path, recipe: str, changes: list[str]) -> TrainConfig:
    """The recipe with random images of its size and classes, and a new encoder where it names one."""
    config = load_recipe(recipe, changes)
    assert isinstance(config, TrainConfig), f"{recipe} trains no generator"
    size, classes = getattr(config.data, "size", None) or 32, config.batch.classes
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (200 * classes, size, size, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(len(images)) % classes)
    made = [f"data.path={folder / 'images.npz'}"]
    if config.encoders:
        save_model(ResNetMAE(3, 64, (2, 2, 2, 2), num_classes=classes), folder / "encoder")
        made.append(f"encoders=[{{kind: mae, path: {folder / 'encoder'}}}]")
    config = load_recipe(recipe, [*made, *changes])
    assert isinstance(config, TrainConfig)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="cifar10")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = find_device(args.device)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = make_up(Path(folder), args.recipe, args.changes)
        task = Training(config, Distributed.start(str(device)))
        phases = Phases()
        parameters = list(task.generator.parameters())
        optimizer, averages = make_optimizer(parameters, config.optim), EMA(task.generator, config.ema)
        seconds, losses = [time.perf_counter() - start], []
        print(f"built in {seconds[0]:.1f} s", flush=True)

        def run() -> None:
            phases.begin("other")
            begin = time.perf_counter()
            optimizer.zero_grad()
            losses.append(float(task.compute_gradient(len(losses))))
            phases.begin("optimizer")
            clip(parameters, config.optim.clip)
            optimizer.step()
            averages.update(task.generator)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begin)

        for _ in range(args.steps):
            run()
            if len(losses) <= 3:
                print(f"step {len(losses)}: {seconds[-1]:.2f} s", flush=True)
        found: dict[str, Any] = {
            "recipe": args.recipe,
            "changes": args.changes,
            "steps": args.steps,
            "build_seconds": seconds[0],
            "first_step_seconds": seconds[1],
            "steps_per_second": 1 / statistics.median(seconds[len(seconds) // 2 :]),
            "losses": [losses[0], losses[-1]],
        }
        if device.type == "cuda":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        print(json.dumps(found), flush=True)
        if args.profile:
            task.compute = task.step  # only launches tell which part they belong to
            phases.watch(task.generator, task.phi, task.step.loss)  # type: ignore[arg-type]
            run()
            rows = profile_step(run, device, steps=3)
            found["profile"] = [vars(cost) for cost in rows[:60]]
            parts: dict[str, float] = {}
            for cost in rows:
                parts[cost.phase] = parts.get(cost.phase, 0) + 1000 * cost.seconds
            print({phase: round(ms, 2) for phase, ms in parts.items()})
            for cost in rows[:25]:
                print(f"{cost.phase:10} {cost.calls:7.1f} {1000 * cost.seconds:8.3f} ms {cost.name[:90]}")
        task.data.close()
    evaluator = "steps by the clock, one by one: median of the later half; peak memory allocated by PyTorch"
    save(args.json, evaluator, found)


if __name__ == "__main__":
    main()
