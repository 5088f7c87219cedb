"""Folders of a studio for tests: a run, a folder of images."""

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from driftgen.studio.readable_folders import ReadableFolders
from tests.support.image_data import noise

RUN = Path(__file__).parents[1] / "data" / "older_run"


def make_folders(place):
    """Return empty folders of runs and data."""
    for name in ("runs", "data"):
        (place / name).mkdir()
    return ReadableFolders(place / "runs", place / "data")


def add_run(folders, name="old", **header):
    """Copy a run of ten steps on the packaged digits, with its model; ``header`` changes its metrics."""
    folder = folders.runs / name
    shutil.copytree(RUN, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["header"] |= header
    (folder / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    return folder


def add_photos(folders, name="photos", classes=("cats", "dogs"), count=6, side=16):
    """Write a folder of random images, one folder per class."""
    for label in classes:
        folder = folders.data / name / label
        folder.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(noise(side, side, 3)).save(folder / f"{i}.png")
    return folders.data / name


def smooth_photos(folders, name="shapes", count=24, side=16):
    """Write images of bright and dark squares, which a tiny run can train on."""
    for label, low in (("bright", 150), ("dark", 20)):
        folder = folders.data / name / label
        folder.mkdir(parents=True)
        for i in range(count):
            pixels = np.full((side, side, 3), 90, np.uint8)
            pixels[4:12, 4:12] = low + 4 * (i % 20)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return folders.data / name
