"""Random images, tar files, and a fixture that opens datasets and closes them."""

import io
import tarfile

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


def write_tar(path, members):
    """Write a tar file of (name, content) or TarInfo members."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size = len(member[1])
            tar.addfile(info, io.BytesIO(member[1]))
    return path


def opening():
    """Yield a function that opens images; close them at the end. Use as opened = pytest.fixture(opening)."""
    datasets = []

    def call(path=None, **options):
        datasets.append(open_images(Data(path=None if path is None else str(path), **options)))
        return datasets[-1]

    yield call
    for data in datasets:
        data.close()
