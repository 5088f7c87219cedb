"""The first half of the Train tab: what a folder of images holds, what is wrong with it, what a run costs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from driftgen.data.config import Data
from driftgen.data.images import open_images
from driftgen.errors import InputError
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.training.own_images import name_recipe
from driftgen.training.recipe_sizes import SIZES, few_images_limit

__all__ = ["FolderReport", "TrainCommand", "check_folder", "list_datasets", "measure_cost", "train_command"]

SIZE = 32  # pixels; images are opened, and not resized, to count them
SHOWN_NAMES = 5
MOST_CLASSES = 50  # that are listed
MOST_DATASETS = 200
SECONDS = 600  # of a dry run
ARRAYS = (".npz", ".npy")


class FolderReport(NamedTuple):
    """Images per class by name, the number of all images and classes, and problems as sentences."""

    counts: dict[str, int]
    images: int
    classes: int
    problems: list[str]


class TrainCommand(NamedTuple):
    """A command: its words without the program, and the folder of its run."""

    words: tuple[str, ...]
    out: Path

    @property
    def text(self) -> str:
        """The command as one types it."""
        return shlex.join(["driftgen", *self.words])


def list_datasets(folders: ReadableFolders) -> list[str]:
    """Return the folders and arrays directly inside the folder of data, and the folder itself as ``.``."""
    try:
        with os.scandir(folders.data) as entries:
            names = sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and (entry.is_dir() or entry.name.lower().endswith(ARRAYS))
            )
    except OSError:
        names = []
    return [".", *(name for name in names[:MOST_DATASETS] if folders.contains(folders.data / name))]


def check_folder(name: str, folders: ReadableFolders) -> FolderReport:
    """Open every image as training does, and return the counts and the problems.

    What training would refuse raises the same error.
    """
    path = folders.check_tree(folders.dataset(name))
    data = open_images(Data(path=str(path), size=SIZE, workers=0))
    data.close()
    counts = torch.bincount(data.labels.cpu(), minlength=len(data.class_names)).tolist()
    problems = [f"{note}." for note in getattr(data, "notes", [])]
    unreadable = list(getattr(data, "unreadable", []))
    if unreadable:
        more = f" and {len(unreadable) - SHOWN_NAMES:,} more" if len(unreadable) > SHOWN_NAMES else ""
        problems.append(
            f"{len(unreadable):,} of {len(data.labels) + len(unreadable):,} images cannot be read and would "
            f"be left out: {'; '.join(unreadable[:SHOWN_NAMES])}{more}."
        )
    least, most = min(counts), max(counts)
    smallest = data.class_names[counts.index(least)]
    if least < few_images_limit():
        problems.append(
            f"{smallest} has {least:,} images: with fewer than {few_images_limit():,} in a class a generator "
            "can memorize them, so training turns on augmentation."
        )
    if most > 10 * least:
        largest = data.class_names[counts.index(most)]
        problems.append(f"Classes are uneven: {largest} has {most:,} images, {smallest} has {least:,}.")
    listed = dict(list(zip(data.class_names, counts, strict=True))[:MOST_CLASSES])
    return FolderReport(listed, sum(counts), len(counts), problems)


def train_command(name: str, size: str, run: str, folders: ReadableFolders) -> TrainCommand:
    """Return the command that trains on a dataset.

    Args:
        name: of the dataset.
        size: of the recipe.
        run: name of the run's folder; named after the dataset if empty.
        folders: that may be read and written.
    """
    path = folders.dataset(name)
    if size not in SIZES:
        raise InputError(f"size={size} is not known: choose from {', '.join(SIZES)}")
    chosen = run.strip() or name_recipe(path.resolve(), "train").run
    if chosen.startswith(".") or Path(chosen).name != chosen or len(chosen) > 100 or not chosen.isprintable():
        raise InputError(f"run {chosen!r} is no name of a folder: use letters, digits and dashes")
    out = folders.check(folders.runs / chosen)
    # A folder is told from a recipe of the same name by its slash.
    shown = str(path) if "/" in str(path) else f"./{path}"
    return TrainCommand(("train", shown, "--size", size, "--out", str(out), "--yes"), out)


def measure_cost(command: TrainCommand) -> str:
    """Return what the dry run of a command prints: time, memory and disk."""
    program = [sys.executable, "-m", "driftgen", *command.words, "--dry-run"]
    try:
        done = subprocess.run(
            program,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            env=os.environ | {"COLUMNS": "100", "NO_COLOR": "1"},
        )
    except subprocess.TimeoutExpired:
        raise InputError(f"the dry run has not ended after {SECONDS} s: choose a smaller size") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise InputError(last.removeprefix("driftgen: error: "))
    # An encoder that is pretrained first has rows of its own, which begin in the same way.
    return done.stdout.strip().replace("\ntime ", "\n\ntime ")
