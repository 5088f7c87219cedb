"""Write random images in the shapes of CIFAR-10 and Tiny-ImageNet.

Short trainings on them fill the caches of the compiler.

python tools/goes/random_sets.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

SETS = {"train": (32, 10, 5000), "tiny": (64, 20, 10000)}  # pixels, classes, images


def main(folder: Path) -> None:
    """Write one file for each set."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (size, classes, number) in SETS.items():
        images = draw.integers(0, 256, (number, size, size, 3), dtype=np.uint8)
        names = np.array([str(i) for i in range(classes)])
        np.savez(folder / f"{name}.npz", images=images, labels=np.arange(number) % classes, class_names=names)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
