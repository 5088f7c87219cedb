"""Depth at which samples differ: Fréchet distances in layers of the FID Inception, not only in its last one.

    python -m tools.layer_distances inception.pt train.npz NAME=MODEL ... --out layer-distances.json

A layer's features are its map, averaged over locations. Distances are those between samples and real images,
divided by the total variance of the real ones. The row ``real`` compares other real images: its distance is
that of two finite sets of one kind.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftgen.data.config import Data
from driftgen.errors import InputError
from driftgen.evaluation.frechet import Moments, frechet_distance
from driftgen.evaluation.inception import load_inception
from driftgen.support.dtype_names import parse_dtype
from driftgen.support.images import rounded_bytes, to_bytes
from driftgen.support.progress import track
from driftgen.support.provenance import environment
from tools.blind_spots import image_sets
from tools.records import Results, fill, markdown, write_record

__all__ = ["LAYERS", "main", "measure", "table"]

LAYERS = ("Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6a", "Mixed_6e", "Mixed_7a", "Mixed_7c")
BATCH = 50


@torch.inference_mode()
def moments(network: nn.Module, images: Tensor) -> dict[str, Moments]:
    """Return the moments of each layer's features over images, uint8 ``[n, 3, H, W]``."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, output: found.update({name: output.float().mean((2, 3))})

    hooks = [network.get_submodule(name).register_forward_hook(keep(name)) for name in LAYERS]
    sums: dict[str, Moments] = {}
    try:
        start = time.perf_counter()
        with track("inception", len(images), "s") as on_step:
            for batch in images.split(BATCH):
                network(batch)
                for name, value in found.items():
                    sums[name] = sums[name] + Moments.of(value) if name in sums else Moments.of(value)
                on_step(next(iter(sums.values())).count, time.perf_counter() - start)
    finally:
        for hook in hooks:
            hook.remove()
    return sums


def measure(network: nn.Module, real: Tensor, sets: dict[str, Tensor]) -> list[dict[str, Any]]:
    """Return the distance of each set from the real images in every layer: its part of the means, and all."""
    reference, rows = moments(network, real), []
    for name, images in sets.items():
        row: dict[str, Any] = {"samples": name}
        for layer, found in moments(network, images).items():
            expected = reference[layer]
            variance = float(expected.covariance.trace())
            means = float((found.mean - expected.mean).square().sum())
            row[layer] = {
                "means": means / variance,
                "distance": frechet_distance(found, expected) / variance,
            }
        rows.append(row)
    return rows


def table(results: Results) -> str:
    """Distances by layer."""
    rows = results.load("cifar10/layer-distances.json")["rows"]
    cells = [(layer, *(fill("{distance:.3f} ({means:.4f})", row[layer]) for row in rows)) for layer in LAYERS]
    return markdown(("layer", *(row["samples"] for row in rows)), cells)


def main(arguments: list[str]) -> int:
    """Write the record. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.layer_distances")
    parser.add_argument("inception", help="file of the FID Inception")
    parser.add_argument("data", type=Path, help="color images, .npz")
    parser.add_argument("models", nargs="+", help="NAME=MODEL, a generator on the same classes")
    parser.add_argument("--size", type=int, default=32, help="side of the images")
    parser.add_argument("--per-class", type=int, default=500, help="images of a class in each set")
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument("--dtype", default="float32", help="of the network, such as bfloat16")
    parser.add_argument("--out", type=Path, required=True, help="file of the record")
    options = parser.parse_args(arguments)
    try:
        network = load_inception(options.inception).network.to(parse_dtype(options.dtype))
        data = Data(path=str(options.data), size=options.size, channels=3)
        real, sets = image_sets(data, options.models, options.per_class, options.guidance)
        pixels = {name: _color(to_bytes(images).permute(0, 3, 1, 2)) for name, images in sets.items()}
        pixels["real"] = rounded_bytes(sets["real"])
        record = {
            "command": shlex.join(["python", "-m", "tools.layer_distances", *arguments]),
            "environment": environment(torch.device("cpu")),
            "evaluator": "FID Inception 2015-12-05, maps averaged over locations; distances in float64",
            "dtype": options.dtype,
            "images_per_set": len(real),
            "guidance": options.guidance,
            "seed": 0,
            "rows": measure(network, rounded_bytes(real), pixels),
        }
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    write_record(options.out, record)
    return 0


def _color(images: Tensor) -> Tensor:
    """Return images with three channels, equal ones for gray images."""
    return images.expand(-1, 3, -1, -1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
