"""Write random images in the shape of CIFAR-10, for short trainings that fill the caches of the compiler.

python tools/goes/random_sets.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

PIXELS, CLASSES, IMAGES = 32, 10, 5000


def main(folder: Path) -> None:
    """Write train.npz."""
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (IMAGES, PIXELS, PIXELS, 3), dtype=np.uint8)
    names = np.array([str(i) for i in range(CLASSES)])
    np.savez(folder / "train.npz", images=images, labels=np.arange(IMAGES) % CLASSES, class_names=names)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
