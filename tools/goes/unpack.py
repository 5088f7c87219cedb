"""Unpack the images that the scripts beside it train with.

python tools/goes/unpack.py SOURCE DATA

Every set whose files are all in SOURCE is written to DATA, unless it is there: ``train.npz`` (CIFAR-10, from
five sheets ``cifar10_train1.webp`` of 100 x 100 images and ``cifar10_labels.npz``), and ``tiny.npz`` and
``tiny-test.npz`` (from ``tiny_imagenet_20cls_jpeg.npz``: JPEG files, one after the other, with their
offsets). Parts of a file, ``inception.part.00`` and ``01``, are joined to ``inception.pt``.
"""

from __future__ import annotations

import io
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

CIFAR_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def cifar10(source: Path, data: Path) -> None:
    """Write ``train.npz`` if the five sheets are there."""
    sheets = [source / f"cifar10_train{i}.webp" for i in range(1, 6)]
    if all(path.exists() for path in (*sheets, source / "cifar10_labels.npz")):
        Image.MAX_IMAGE_PIXELS = None
        tiles = [np.asarray(Image.open(path).convert("RGB")).reshape(100, 32, 100, 32, 3) for path in sheets]
        images = np.concatenate([part.transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3) for part in tiles])
        labels = np.load(source / "cifar10_labels.npz")["y_train"].astype(np.int64)
        _save(data / "train.npz", images, labels, CIFAR_CLASSES)


def tiny(source: Path, data: Path) -> None:
    """Write ``tiny.npz`` and ``tiny-test.npz``."""
    path = source / "tiny_imagenet_20cls_jpeg.npz"
    if path.exists():
        file = np.load(path)
        for part, name in (("train", "tiny.npz"), ("val", "tiny-test.npz")):
            content, ends = file[f"{part}_jpeg"].tobytes(), file[f"{part}_off"]
            jpegs = [content[a:b] for a, b in pairwise(ends)]
            images = [np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB")) for jpeg in jpegs]
            names = [str(one).split(",")[0] for one in file["name"]]
            _save(data / name, np.stack(images), file[f"{part}_y"].astype(np.int64), names)


def inception(source: Path, data: Path) -> None:
    """Write ``inception.pt`` from its parts."""
    parts = sorted(source.glob("inception.part.*"))
    if len(parts) == 2:
        _replace(data / "inception.pt", b"".join(part.read_bytes() for part in parts))


def _save(path: Path, images: np.ndarray, labels: np.ndarray, names: list[str]) -> None:
    if not path.exists():
        buffer = io.BytesIO()
        np.savez(buffer, images=images, labels=labels, class_names=np.array(names))
        _replace(path, buffer.getvalue())


def _replace(path: Path, content: bytes) -> None:
    # Scripts wait for the name.
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


if __name__ == "__main__":
    source, data = Path(sys.argv[1]), Path(sys.argv[2])
    data.mkdir(parents=True, exist_ok=True)
    for unpack in (cifar10, tiny, inception):
        unpack(source, data)
    print(*sorted(path.name for path in data.iterdir()))
