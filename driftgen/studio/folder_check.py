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
from driftgen.data.encoded_images import UnreadableImagesError
from driftgen.data.images import open_images
from driftgen.errors import InputError
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.training.own_images import name_recipe
from driftgen.training.recipe_sizes import SIZES, few_images_limit

__all__ = ["FolderReport", "TrainCommand", "check_folder", "list_datasets", "measure_cost", "train_command"]

SIZE = 32  # pixels; images are opened, and not resized, to count them
MOST_NAMES = 200  # of unreadable images that are listed
MOST_CLASSES = 50  # that are listed
MOST_DATASETS = 200
SECONDS = 600  # of a dry run
ARRAYS = (".npz", ".npy")


class FolderReport(NamedTuple):
    """Contents of a dataset.

    Attributes:
        counts: readable images per class by name.
        images: number of all readable images.
        classes: number of all classes.
        problems: sentences about what training would go on with.
        unreadable: name and error message of images that cannot be read.
        unreadable_count: number of all of them.
        refusal: why training would refuse the dataset; "" if it would not.
    """

    counts: dict[str, int]
    images: int
    classes: int
    problems: list[str]
    unreadable: list[str]
    unreadable_count: int
    refusal: str = ""


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

    A dataset with too many unreadable images has a report too, which names them. Anything else that training
    would refuse raises the same error.
    """
    path = folders.check_tree(folders.dataset(name))
    try:
        data = open_images(Data(path=str(path), size=SIZE, workers=0))
    except UnreadableImagesError as error:
        total = sum(error.counts.values()) + len(error.unreadable)
        refusal = (
            f"{len(error.unreadable):,} of {total:,} images cannot be read: repair or remove them. Training "
            "refuses a dataset with more than 1% of such images, or with a class of nothing else."
        )
        return _report(error.counts, _class_problems(error.counts), error.unreadable, refusal)
    data.close()
    numbers = torch.bincount(data.labels.cpu(), minlength=len(data.class_names)).tolist()
    counts = dict(zip(data.class_names, numbers, strict=True))
    problems = [f"{note}." for note in getattr(data, "notes", [])]
    unreadable = list(getattr(data, "unreadable", []))
    if unreadable:
        problems.append(
            f"{len(unreadable):,} of {len(data.labels) + len(unreadable):,} images cannot be read and would "
            "be left out."
        )
    return _report(counts, problems + _class_problems(counts), unreadable)


def _report(
    counts: dict[str, int], problems: list[str], unreadable: list[str], refusal: str = ""
) -> FolderReport:
    return FolderReport(
        dict(list(counts.items())[:MOST_CLASSES]),
        sum(counts.values()),
        len(counts),
        problems,
        unreadable[:MOST_NAMES],
        len(unreadable),
        refusal,
    )


def _class_problems(counts: dict[str, int]) -> list[str]:
    """Return what is wrong with the numbers of images per class. A class without any is refused elsewhere."""
    found = {name: count for name, count in counts.items() if count}
    if not found:
        return []
    problems = []
    smallest, largest = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    least, most = found[smallest], found[largest]
    if least < few_images_limit():
        problems.append(
            f"{smallest} has {least:,} images: with fewer than {few_images_limit():,} in a class a generator "
            "can memorize them, so training turns on augmentation."
        )
    if most > 10 * least:
        problems.append(f"Classes are uneven: {largest} has {most:,} images, {smallest} has {least:,}.")
    return problems


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
    return done.stdout.strip()
