"""What reading ahead saves: how long a step waits for the real samples of the paper's ablation, 64 classes of
64 positives and 16 unconditional ones, from a cache of latents, with and without it.

    python -m benchmarks.prefetch [--step 1.0] [--steps 8] [--json FILE]

The step itself is a pause of so many seconds: a GPU works meanwhile, and the host has nothing to do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.results import save
from driftgen.data.arrays import ArrayImages
from driftgen.data.class_batches import ClassIndex, StepSizes
from driftgen.data.config import Augment
from driftgen.data.latent_encoding import encode_images
from driftgen.data.latents import LatentCache
from driftgen.tokenizers import Identity

CLASSES, EACH = 100, 128
SIZES = StepSizes(64, 64, 16)


def waits(cache: LatentCache, ahead: bool, steps: int, pause: float) -> float:
    """Median seconds that a step waits for its samples."""
    source, found = ClassIndex(cache, SIZES), []
    if not ahead:
        source._ahead = None
    for step in range(steps + 2):
        start = time.perf_counter()
        source.draw(step)
        found.append(time.perf_counter() - start)
        time.sleep(pause)
    return statistics.median(found[2:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", type=float, default=1.0, help="seconds")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        images = torch.randint(256, (CLASSES * EACH, 4, 32, 32), dtype=torch.uint8)
        labels = torch.arange(CLASSES).repeat_interleave(EACH)
        data = ArrayImages(images, labels, [str(c) for c in range(CLASSES)], Augment())
        encode_images(data, Identity(4), folder, dtype="bfloat16")
        cache = LatentCache(folder)
        row = {
            "samples": SIZES.classes * (SIZES.positives + SIZES.unconditional),
            "step_seconds": args.step,
            "waits_seconds": waits(cache, True, args.steps, args.step),
            "waits_seconds_without": waits(cache, False, args.steps, args.step),
        }
    print(json.dumps(row))
    save(args.json, "seconds that a step waits for its samples: median after two steps", {"rows": [row]})


if __name__ == "__main__":
    main()
