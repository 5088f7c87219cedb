"""Folders of image files: a subfolder per class, or labels in ``metadata.csv`` (an imagefolder)."""

from __future__ import annotations

import csv
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from driftgen.data.classes import number_classes
from driftgen.data.encoded_images import EncodedImages, Listing
from driftgen.data.locate import IMAGE_SUFFIXES, SPLIT_NAMES, choose_split, is_image
from driftgen.errors import InputError
from driftgen.support.sheets import RECORD, SHEET
from driftgen.support.untrusted_files import parse_json, reading

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["list_images", "open_folder"]

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
LABEL_COLUMNS = ("label", "labels", "class")


def open_folder(path: Path, config: Data) -> EncodedImages:
    """Open a folder of images. Hidden files, files of other types and the sheet of samples are ignored.

    - Every subfolder is a class of that name; without subfolders there is one class.
    - ``metadata.csv`` or ``metadata.jsonl`` with the columns ``file_name`` and ``label`` gives the classes
      instead.
    - If all subfolders are splits (``train``, ``val``, ``test`` ...), ``train`` is opened.
    """
    try:
        return EncodedImages(list_images(path, config.conditional), config)
    except OSError as error:
        raise InputError(
            f"data.path={path} cannot be read: {error.strerror}; check its permissions"
        ) from None


def list_images(path: Path, conditional: bool = True) -> Listing:
    """Return the image files of a folder in name order, with their labels."""
    top_level, folders, others = [], [], []
    with os.scandir(path) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif is_image(entry.name):
                top_level.append(entry.path)
            else:
                others.append(entry.name)
    if RECORD in others:  # written by driftgen sample
        top_level = [file for file in top_level if os.path.basename(file) != SHEET]
    if folders and not top_level and all(name.lower() in SPLIT_NAMES for name in folders):
        split, notes = choose_split(path, folders)
        listing = list_images(path / split, conditional)
        return listing._replace(notes=[*notes, *listing.notes])
    by_folder = [_walk(os.path.join(path, folder)) for folder in folders]
    everything = top_level + [file for files in by_folder for file in files]
    if not everything:
        raise InputError(
            f"data.path={path} holds no images: supported are {', '.join(sorted(IMAGE_SUFFIXES))}",
            topic="no-images",
        )
    whole = Listing(str(path), everything, everything, np.zeros(len(everything), np.int64), ["all"])
    if not conditional:
        return whole
    metadata = next((name for name in METADATA if name in others), None)
    notes = []
    if metadata is not None:
        values = _read_labels(path / metadata, everything)
        if values is not None:
            labels, names, notes = number_classes(values)
            return whole._replace(labels=labels, class_names=names, notes=notes)
        if not any(by_folder):
            notes = [f"{path / metadata} has no column {LABEL_COLUMNS[0]}: all images are of one class"]
    if not any(by_folder):
        if other := next((name for name in others if Path(name).stem.lower() == "labels"), None):
            raise InputError(
                f"{path / other} is not read: write labels as metadata.csv with the columns file_name and "
                "label, or as one folder per class, or set data.conditional=false"
            )
        return whole._replace(class_names=[path.resolve().name], notes=notes)
    if top_level:
        raise InputError(
            f"data.path={path} holds images beside class folders, such as {Path(top_level[0]).name}: move "
            "them into a folder of their class, or set data.conditional=false"
        )
    for folder, files in zip(folders, by_folder, strict=True):
        if not files:
            raise InputError(
                f"class folder {path / folder} holds no images: add some, or remove the folder",
                topic="no-images",
            )
    labels = np.repeat(np.arange(len(by_folder)), [len(files) for files in by_folder])
    return whole._replace(labels=labels, class_names=folders)


def _walk(folder: str) -> list[str]:
    files = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(parent, name) for name in sorted(names) if is_image(name)]
    return files


def _raise(error: OSError) -> None:
    raise error


def _read_labels(path: Path, files: list[str]) -> list[int | str] | None:
    """Return the label of each file from the metadata of an imagefolder; None if it has no labels."""
    if path.suffix == ".parquet":
        raise InputError(f"{path} is not read: write it as metadata.csv with the columns file_name and label")
    if not path.is_file():
        raise InputError(f"{path} is not a regular file")
    with reading(path, "labels", "repair it"), path.open(encoding="utf-8-sig", newline="") as stream:
        rows: list[Any] = (
            list(csv.DictReader(stream))
            if path.suffix == ".csv"
            else [parse_json(line, finite=False) for line in stream if line.strip()]
        )
    column, found = None, dict[str, Any]()
    for number, row in enumerate(rows, start=1):
        name = row.get("file_name") if isinstance(row, dict) else None
        if not isinstance(name, str) or not name:
            raise InputError(
                f"{path}: row {number} has no file_name; name an image of this folder in each row"
            )
        key = PurePosixPath(name).as_posix()
        if key in found:
            raise InputError(f"{path}: row {number} names {name} a second time")
        column = column or next((label for label in LABEL_COLUMNS if label in row), None)
        found[key] = row.get(column) if column else None
    if column is None:
        return None
    values = []
    for file in files:
        name = Path(file).relative_to(path.parent).as_posix()
        value = found.get(name)
        if name not in found:
            raise InputError(f"{path} has no row for {name}: add one, or remove the image")
        if not isinstance(value, int | str) or isinstance(value, bool) or value == "":
            raise InputError(f"{path}: {column} of {name} is {value!r}, expected a class number or a name")
        values.append(value)
    listed = {Path(file).relative_to(path.parent).as_posix() for file in files}
    if missing := next((name for name in found if name not in listed), None):
        raise InputError(f"{path} names {missing}, which is not an image in this folder: remove the row")
    if all(isinstance(value, int) or (value.isdecimal() and len(value) < 19) for value in values):
        return [int(value) for value in values]
    return [str(value) for value in values]
