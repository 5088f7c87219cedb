"""Noise of the gradient that a generated image receives, by the sizes of a group.

    python -m tools.gradient_noise ENCODER MODEL IMAGES.npz --out results/cifar10/gradient-noise.json

The drifting loss estimates the field from the samples of one step. For a few generated images of one class,
this compares the gradient from a small group with the gradient from the largest group that the options allow:
their cosine is 1 without noise. The fine part of a gradient is what remains without means over 4×4 pixels.
``vectors`` is the option of ``driftgen train``: the number of vectors of a feature that a step compares.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import driftgen as dg
from driftgen.data.config import Data
from driftgen.data.images import open_images
from driftgen.support.atomic_write import atomic_write
from driftgen.support.provenance import provenance
from tools.records import Results, fill, markdown

__all__ = ["Groups", "fine_part", "table"]

EVALUATED = 32  # images whose gradients are compared
CASES: tuple[tuple[int, int, int | None], ...] = (
    (64, 64, None),
    (64, 96, None),
    (128, 256, 16),
    (256, 256, 16),
    (256, 256, 4),
    (256, 512, 16),
    (256, 512, 4),
)


class Groups:
    """Features of generated and real images of one class, and gradients from random groups of them.

    Args:
        encoder: φ.
        generated: images ``[N, C, H, W]``; gradients are those of the first ``evaluated``.
        real: images ``[P, C, H, W]``.
        evaluated: number of images whose gradients are computed.
    """

    def __init__(
        self, encoder: Any, generated: Tensor, real: Tensor, evaluated: int = EVALUATED, seed: int = 0
    ) -> None:
        self.generated, self.real = _features(encoder, generated), _features(encoder, real)
        self.evaluated, self.rng = evaluated, torch.Generator().manual_seed(seed)
        self.images = generated[:evaluated].clone().requires_grad_()
        self.features = _with_pixels(encoder.features(self.images), self.images)

    def gradient(
        self, n: int, p: int, vectors: int | None = None, temperatures: tuple[float, ...] = (0.02, 0.05, 0.2)
    ) -> Tensor:
        """Return ∂L/∂x of the evaluated images in a random group of n generated and p real images."""
        k, loss = self.evaluated, dg.DriftingLoss(temperatures=temperatures)
        first = next(iter(self.generated.values()))
        others = k + torch.randperm(len(first) - k, generator=self.rng)[: n - k]
        chosen = torch.cat([torch.arange(k), others])
        positives = torch.randperm(len(next(iter(self.real.values()))), generator=self.rng)[:p]
        gradients = []
        for name, feature in self.features.items():
            count = feature.shape[1]
            subset = torch.randperm(count, generator=self.rng)[: count if vectors is None else vectors]
            x = self.generated[name][chosen][:, subset].float().requires_grad_()
            y = self.real[name][positives][:, subset].float()
            loss({name: x[None]}, {name: y[None]}).loss.backward()
            gradient = torch.zeros_like(feature)
            gradient[:, subset] = x.grad[:k]  # type: ignore[index]
            gradients.append(gradient)
        (result,) = torch.autograd.grad(
            list(self.features.values()), self.images, gradients, retain_graph=True
        )
        return result


def fine_part(images: Tensor) -> Tensor:
    """Return images minus their means over 4×4 pixels, interpolated."""
    return images - F.interpolate(F.avg_pool2d(images, 4), scale_factor=4.0, mode="bilinear")


def table(results: Results) -> str:
    """Cosine of gradients by the sizes of a group."""
    rows = [
        (
            fill("{generated} / {positives}", row),
            "all" if row["vectors"] is None else str(row["vectors"]),
            fill("{cosine:.2f}", row),
            fill("{cosine_fine:.2f}", row),
        )
        for row in results.load("cifar10/gradient-noise.json")["rows"]
    ]
    header = ("generated / positives", "vectors of a feature", "cosine", "cosine of the fine part")
    return markdown(header, rows)


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two tensors as vectors."""
    return float((a * b).sum() / (a.norm() * b.norm()))


@torch.no_grad()
def _features(encoder: Any, images: Tensor) -> dict[str, Tensor]:
    parts = [_with_pixels(encoder.features(batch), batch) for batch in images.split(64)]
    return {name: torch.cat([part[name].half() for part in parts]) for name in parts[0]}


def _with_pixels(features: Mapping[str, Tensor], images: Tensor) -> dict[str, Tensor]:
    return {**features, "global": images.flatten(1)[:, None]}


def main(arguments: list[str]) -> int:
    """Measure all cases and write the record. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.gradient_noise")
    parser.add_argument("encoder", help="saved masked autoencoder")
    parser.add_argument("model", help="saved generator")
    parser.add_argument("images", type=Path, help=".npz of images and labels")
    parser.add_argument("--label", type=int, default=7)
    parser.add_argument("--generated", type=int, default=448, help="largest number of generated images")
    parser.add_argument("--positives", type=int, default=1400, help="largest number of real images")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    encoder: Any = dg.load_model(options.encoder).float().eval().requires_grad_(False)
    pipe = dg.DriftPipeline.from_pretrained(options.model, dtype=torch.float32)
    data = open_images(Data(kind="images", path=str(options.images)))
    rows = (torch.as_tensor(data.labels) == options.label).nonzero()[: options.positives, 0]
    real = data.load(rows, 0)
    generated = pipe([options.label] * options.generated, seed=1, output="tensor")
    assert isinstance(generated, Tensor)
    groups = Groups(encoder, generated.float(), real.float())
    reference = groups.gradient(options.generated, options.positives)
    found = []
    for n, p, vectors in CASES:
        start = time.perf_counter()
        drawn = [groups.gradient(n, p, vectors) for _ in range(options.repeats)]
        row = {
            "generated": n,
            "positives": p,
            "vectors": vectors,
            "cosine": sum(cosine(g, reference) for g in drawn) / len(drawn),
            "cosine_fine": sum(cosine(fine_part(g), fine_part(reference)) for g in drawn) / len(drawn),
            "seconds": time.perf_counter() - start,
        }
        print(row, flush=True)
        found.append(row)
    record = {
        **provenance(f"python -m tools.gradient_noise ENCODER MODEL IMAGES --label {options.label}"),
        "evaluator": f"cosine with the gradient from {options.generated} generated and {options.positives} "
        f"real images, {EVALUATED} images, mean of {options.repeats} groups",
        "rows": found,
    }
    with atomic_write(options.out) as scratch:
        scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
