"""Random images, and a fixture that opens datasets and closes them."""

import numpy as np
import torch

from driftgen.data.images import open_images
from driftgen.training.config import Data

RNG = np.random.default_rng(0)
EVERYTHING = {"flip": True, "crop": "random-resized", "rotate": 20, "zoom": 0.2, "shift": 2}


def noise(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def every(data, seed=0):
    return data.load(torch.arange(len(data.labels)), seed)


def to_bytes(images):
    return ((images + 1) * 127.5).round().to(torch.uint8)


def opening():
    """Yield a function that opens images; close them at the end. Use as opened = pytest.fixture(opening)."""
    datasets = []

    def call(path=None, **options):
        datasets.append(open_images(Data(path=None if path is None else str(path), **options)))
        return datasets[-1]

    yield call
    for data in datasets:
        data.close()
