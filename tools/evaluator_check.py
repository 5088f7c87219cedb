"""Check the evaluator: FID of CIFAR-10's training against its test images, and how far other ways are off.

python -m tools.evaluator_check TRAIN.npz TEST.npz INCEPTION OUT.json
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from driftgen.evaluation import inception
from driftgen.evaluation.frechet import Moments, frechet_distance
from driftgen.evaluation.image_sources import BLOCK, RealImages, open_real
from driftgen.support.provenance import provenance
from driftgen.support.tf32 import tf32

BATCH = 250


def half_pixel(images: Tensor, side: int = inception.SIDE) -> Tensor:
    """Resize as ``F.interpolate`` does: a half-pixel shift, no antialiasing."""
    return F.interpolate(images, (side, side), mode="bilinear", align_corners=False)


def bicubic(images: Tensor, side: int = inception.SIDE) -> Tensor:
    """Resize with an antialiased bicubic filter, to bytes."""
    resized = F.interpolate(images, (side, side), mode="bicubic", align_corners=False, antialias=True)
    return resized.round().clamp(0, 255)


@contextmanager
def resized_by(resize: Callable[..., Tensor]) -> Iterator[None]:
    """Replace the resize of the evaluator."""
    before, inception.resize_tf1 = inception.resize_tf1, resize
    try:
        yield
    finally:
        inception.resize_tf1 = before


def main(train: str, test: str, weights: str, out: str) -> None:
    """Measure all cases and write the record."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = inception.load_inception(weights).network.to(device)
    sets = {name: open_real(path) for name, path in (("train", train), ("test", test))}

    @torch.inference_mode()
    def moments(images: RealImages, *, fast: bool = False, autocast: torch.dtype | None = None) -> Moments:
        total: Moments | None = None
        with tf32(fast), torch.autocast(device.type, autocast, enabled=autocast is not None):
            for block in range(-(-images.count // BLOCK)):
                for part in images.load(block).to(device).split(BATCH):
                    new = Moments.of(network(part)[0])
                    total = new if total is None else total + new
        assert total is not None
        return total

    def timed(**options: Any) -> tuple[Moments, float]:
        start = time.perf_counter()
        result = moments(sets["train"], **options)
        float(result.total[0])  # waits for the GPU
        return result, time.perf_counter() - start

    rows: dict[str, dict[str, float]] = {}
    moments(open_real(test))  # warm-up
    reference, seconds = timed()
    plain = moments(sets["test"])
    rows["float32"] = {"FID": frechet_distance(plain, reference), "seconds": seconds}
    cases: dict[str, dict[str, Any]] = {"tf32": {"fast": True}, "bfloat16": {"autocast": torch.bfloat16}}
    for name, options in cases.items() if device.type == "cuda" else ():
        own, seconds = timed(**options)
        scored = moments(sets["test"], **options)
        rows[name] = {
            "FID": frechet_distance(scored, own),
            "against_float32_statistics": frechet_distance(scored, reference),
            "seconds": seconds,
        }
    for name, resize in (("bilinear with half-pixel shift", half_pixel), ("antialiased bicubic", bicubic)):
        with resized_by(resize):
            rows[name] = {
                "against_float32_statistics": frechet_distance(moments(sets["test"]), reference),
                "FID": frechet_distance(moments(sets["test"]), moments(sets["train"])),
            }
    record: dict[str, Any] = {
        **provenance(shlex.join(["python", "-m", "tools.evaluator_check", *sys.argv[1:]])),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "evaluator": "FID Inception of 2015-12-05; batches of 250; seconds: images of TRAIN",
        "train": sets["train"].about,
        "test": sets["test"].about,
        "rows": rows,
    }
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
