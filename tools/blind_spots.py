"""Blind spots of an encoder: do its features still tell the samples of a generator from real images?

    python -m tools.blind_spots ENCODER train.npz NAME=MODEL ... --out results/cifar10/blind-spots.json

ENCODER is a masked autoencoder, or an entry of ``encoders`` as recipes have them:
``{kind: efficientnet-lite0, path: efficientnet-lite0-57934424.pth, options: {size: 64}}``.

Kernel distances (unbiased squared MMD with kernel (xᵀy / D + 1)³, features standardized by the real images)
between samples and real images, in pooled features of the encoder: of whole images, and of their central
70%, enlarged. The row ``real`` compares other real images. A generator whose whole samples are at the level
of real images while their crops are not has learned what this encoder sees of whole images, and no more.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics.image.kid import poly_mmd

from driftgen.data.config import Data
from driftgen.data.images import open_images
from driftgen.errors import InputError
from driftgen.features.stack import Encoder
from driftgen.pipeline import DriftPipeline
from driftgen.support.provenance import environment
from driftgen.training.build import build_encoder
from driftgen.training.recipes import load_recipe
from driftgen.training.shared_crops import SharedCrops
from tools.records import Results, fill, markdown, write_record

__all__ = ["image_sets", "main", "measure", "pretrained", "table"]

POOLED = re.compile(r"(layer|stage)\d+_mean")
VIEWS = {"whole": [1.0, 0.0, 0.0], "crop": [0.7, 0.15, 0.15]}
BATCH = 100


@torch.inference_mode()
def features(encoder: Encoder, images: Tensor, square: list[float]) -> dict[str, Tensor]:
    """Return the means over the map of each stage, of a view of images: each ``[n, D]``."""
    crops, parts = SharedCrops(1.0, (0.5, 1.0)), list[dict[str, Tensor]]()
    for batch in images.split(BATCH):
        parts.append(encoder.features(crops(batch, torch.tensor([square]))))
    names = [name for name in parts[0] if POOLED.fullmatch(name)]
    if not names:
        raise InputError(f"the encoder has none of the features {POOLED.pattern}: {', '.join(parts[0])}")
    return {name: torch.cat([part[name].flatten(1) for part in parts]).double() for name in names}


def image_sets(
    data: Data, models: Sequence[str], per_class: int, guidance: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return real images, and the sets to compare with them: other real images, and samples of NAME=MODEL."""
    images = open_images(data)
    classes = len(images.class_names)
    chosen = torch.stack([(images.labels == c).nonzero()[: 2 * per_class, 0] for c in range(classes)])
    halves = [images.load(half.flatten(), 0) for half in (chosen[:, :per_class], chosen[:, per_class:])]
    sets = {"real": halves[1]}
    labels = [c for c in range(classes) for _ in range(per_class)]
    for entry in models:
        name, _, path = entry.partition("=")
        pipe = DriftPipeline.from_pretrained(path)
        sets[name] = pipe(labels, guidance=guidance, seed=0, output="tensor")
    return halves[0], sets


def measure(encoder: Encoder, real: Tensor, sets: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the kernel distance between real images and each set, for every view and feature."""
    rows = []
    for view, square in VIEWS.items():
        reference = features(encoder, real, square)
        for name, images in sets.items():
            row: dict[str, Any] = {"view": view, "samples": name}
            for key, value in features(encoder, images, square).items():
                mean, std = reference[key].mean(0), reference[key].std(0) + 1e-6
                a, b = (reference[key] - mean) / std, (value - mean) / std
                row[key] = float(poly_mmd(a, b))
            rows.append(row)
    return rows


def table(results: Results, file: str = "blind-spots.json") -> str:
    """Kernel distances by view, samples and feature."""
    rows = results.load(f"cifar10/{file}")["rows"]
    names = [name for name in rows[0] if POOLED.fullmatch(name)]
    cells = [(row["samples"], row["view"], *(fill(f"{{{name}:.4f}}", row) for name in names)) for row in rows]
    return markdown(("samples", "view", *names), cells)


def pretrained(results: Results) -> str:
    """The same in features of an encoder with ImageNet weights."""
    return table(results, "blind-spots-lite0.json")


def main(arguments: list[str]) -> int:
    """Write the record. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.blind_spots")
    parser.add_argument("encoder", help="a masked autoencoder, or an entry of encoders as recipes have them")
    parser.add_argument("data", type=Path, help="its training images, .npz")
    parser.add_argument("models", nargs="+", help="NAME=MODEL, a generator on the same classes")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    parser.add_argument("--per-class", type=int, default=100, help="images of a class in each set")
    parser.add_argument("--out", type=Path, required=True, help="file of the record")
    options = parser.parse_args(arguments)
    try:
        given: str = options.encoder
        entry = given if given.startswith("{") else json.dumps({"path": given})
        recipe: Any = load_recipe("digits", [f"encoders=[{entry}]"], "train")
        encoder: Any = build_encoder(recipe.encoders[0], "encoder").eval()
        channels: Any = getattr(encoder, "in_channels", 3)
        data = Data(path=str(options.data), size=options.size, channels=channels)
        real, sets = image_sets(data, options.models, options.per_class, guidance=1.0)
        record = {
            "command": shlex.join(["python", "-m", "tools.blind_spots", *arguments]),
            "environment": environment(torch.device("cpu")),
            "images_per_set": len(real),
            "guidance": 1.0,
            "seed": 0,
            "rows": measure(encoder, real, sets),
        }
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    write_record(options.out, record)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
