"""Write the images of a set, and as many samples of a model of its classes, as one set of twice the classes.

An encoder that learns these labels sees how the samples differ from real images.

python tools/goes/real_and_samples.py train.npz MODEL OUT.npz [GUIDANCE ...]
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from driftgen.pipeline import DriftPipeline


def main(source: str, model: str, out: str, *guidances: str) -> None:
    """Write OUT.npz; equal parts of the samples have each guidance, 1 and 1.5 by default."""
    real = np.load(source)
    labels, names = real["labels"], [str(name) for name in real["class_names"]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pipe = DriftPipeline.from_pretrained(model, device=device, batch_size=500)
    parts = np.array_split(np.random.default_rng(0).permutation(len(labels)), len(guidances) or 2)
    images = np.empty_like(real["images"])
    for seed, (rows, guidance) in enumerate(zip(parts, guidances or ("1.0", "1.5"), strict=True)):
        images[rows] = pipe(labels[rows].tolist(), guidance=float(guidance), seed=seed + 1, output="numpy")
    np.savez(
        out,
        images=np.concatenate([real["images"], images]),
        labels=np.concatenate([labels, labels + len(names)]),
        class_names=np.array([*names, *(f"{name} (sample)" for name in names)]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
