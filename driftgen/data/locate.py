"""Find out what ``data.path`` names: a folder of images, an array, tar shards or a Hugging Face dataset."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from driftgen.errors import InputError
from driftgen.support.user_paths import expand_user

__all__ = [
    "IMAGE_SUFFIXES",
    "SOURCES",
    "Place",
    "choose_split",
    "is_image",
    "is_pattern",
    "is_shard",
    "locate",
    "split_of",
]

Kind = Literal["folder", "array", "tar", "parquet", "saved"]

SOURCES = (
    "a folder of images, an .npz or .npy file, tar shards (a folder, a file, or a pattern such as "
    "'shards-{000..009}.tar'), or a Hugging Face dataset (a folder of .parquet files, or one written by "
    "save_to_disk)"
)
IMAGE_SUFFIXES = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
)
ARRAYS = (".npz", ".npy")
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")  # refused when they are opened
METADATA = "metadata.parquet"  # belongs to a folder of images
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_NAMES = {name: split for split, names in SPLITS.items() for name in names}
MAX_FILES = 1_000_000  # of a pattern


class Place(NamedTuple):
    """Files of a dataset.

    Attributes:
        kind: ``saved`` is a dataset written by ``datasets.save_to_disk``.
        path: as it was given.
        files: shards, in the order of their names.
        notes: one-line remarks on the choice of files.
    """

    kind: Kind
    path: Path
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = ()


def locate(text: str) -> Place:
    """Return the kind and the files of a dataset."""
    path = expand_user(text)
    try:
        if path.is_dir():
            return _locate_folder(path)
    except OSError as error:
        raise InputError(
            f"data.path={text} cannot be read: {error.strerror}; check its permissions"
        ) from None
    if path.exists():
        kind = _kind_of_file(path)
        if kind is None:
            raise InputError(f"data.path={text} is a file: expected {SOURCES}")
        if not path.is_file():
            raise InputError(f"data.path={text} is not a regular file: expected {SOURCES}")
        return Place(kind, path, (path,))
    if not is_pattern(text):
        raise InputError(f"data.path={text}: no such file or folder")
    files = _expand(text)
    kinds = {_kind_of_file(file) for file in files}
    if kinds not in ({"tar"}, {"parquet"}):
        raise InputError(
            f"data.path={text} matches {files[0].name}{' and others' if len(files) > 1 else ''}: a pattern "
            "must match .tar files or .parquet files only"
        )
    return Place("tar" if "tar" in kinds else "parquet", path, tuple(files))


def is_pattern(text: str) -> bool:
    """Return True if a text has wildcards or braces, and so may stand for several files."""
    return any(character in text for character in "*?[{")


def is_shard(text: str) -> bool:
    """Return True if a path or pattern ends like one of tar shards or of parquet files."""
    return _kind_of_file(Path(text)) in ("tar", "parquet")


def is_image(name: str) -> bool:
    """Return True if a file of this name is an image and not hidden."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def split_of(name: str) -> str | None:
    """Return the split that a relative path names, such as ``train`` of ``data/train-00000.parquet``."""
    words = re.split(r"[^a-z]+", name.lower())
    return next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None)


def choose_split(where: Path, splits: Sequence[str]) -> tuple[str, list[str]]:
    """Return the training split of a dataset, or its only split, and notes about those left out."""
    if len(splits) == 1:
        return splits[0], []
    chosen = next((name for name in splits if split_of(name) == "train"), None)
    if chosen is None:
        raise InputError(
            f"data.path={where} holds the splits {', '.join(splits)} and none for training: name the "
            "files of one of them"
        )
    others = ", ".join(name for name in splits if name != chosen)
    return chosen, [f"{where}: split {chosen}; {others} left out"]


def _kind_of_file(path: Path) -> Kind | None:
    name = path.name.lower()
    if name.endswith(ARRAYS):
        return "array"
    if name.endswith((".tar", *COMPRESSED)):
        return "tar"
    return "parquet" if name.endswith(".parquet") else None


def _locate_folder(path: Path) -> Place:
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    ):
        return Place("saved", path)
    shards, images, folders = _scan(path)
    beside = images[:1]
    if not shards:
        # Where datasets of the Hugging Face Hub have their files.
        usual = [name for name in folders if name == "data" or name in SPLIT_NAMES]
        shards = [f"{name}/{shard}" for name in usual for shard in _scan(path / name)[0]]
    else:
        beside += [f"{name}/{image}" for name in folders for image in _scan(path / name)[1][:1]][:1]
    if not shards:
        return Place("folder", path)
    kinds = {_kind_of_file(Path(name)) for name in shards}
    if beside or len(kinds) > 1:
        found = f"{shards[0]} and {beside[0]}" if beside else "both .tar and .parquet files"
        raise InputError(
            f"data.path={path} holds {found}: move the images elsewhere, or name the files, such as "
            f"data.path='{path}/*{Path(shards[0]).suffix}'"
        )
    by_split: dict[str, list[str]] = {}
    for name in shards:
        by_split.setdefault(split_of(name) or "(no split)", []).append(name)
    chosen, notes = choose_split(path, list(by_split))
    files = tuple(path / name for name in sorted(by_split[chosen]))
    return Place("tar" if "tar" in kinds else "parquet", path, files, tuple(notes))


def _scan(path: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the names of shards, images and folders in a folder."""
    shards, images, folders = [], [], []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                folders.append(entry.name)
            elif is_image(entry.name):
                images.append(entry.name)
            elif is_shard(entry.name) and entry.name != METADATA and entry.is_file():
                shards.append(entry.name)
    return sorted(shards), sorted(images), sorted(folders)


def _expand(pattern: str) -> list[Path]:
    """Expand the braces of a pattern as bash and webdataset do, then the wildcards."""
    files = []
    for text in _expand_braces(pattern):
        path = os.path.expanduser(text)
        if any(character in text for character in "*?["):
            matches = sorted(glob.glob(path))
            if not matches:
                raise InputError(f"data.path={pattern}: no file matches {text}")
            files += [Path(match) for match in matches]
        else:
            files.append(Path(path))
    for file in files:
        if not file.is_file():
            raise InputError(f"data.path={pattern}: {file} {'is no file' if file.exists() else 'is missing'}")
    return files


def _expand_braces(pattern: str) -> list[str]:
    parts = re.split(r"\{([^{}]*)\}", pattern)  # text, content of braces, text, ...
    choices = [[part] if i % 2 == 0 else _alternatives(pattern, part) for i, part in enumerate(parts)]
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MAX_FILES:
        raise InputError(f"data.path={pattern} stands for {count:,} files: at most {MAX_FILES:,} can be read")
    return ["".join(choice) for choice in itertools.product(*choices)]


def _alternatives(pattern: str, content: str) -> list[str]:
    match = re.fullmatch(r"(\d{1,12})\.\.(\d{1,12})", content)
    if match is None:
        return content.split(",")
    first, last = int(match[1]), int(match[2])
    if not 0 <= last - first < MAX_FILES:
        raise InputError(f"data.path={pattern}: {{{content}}} must rise by less than {MAX_FILES:,}")
    width = len(match[1]) if match[1].startswith("0") or len(match[1]) == len(match[2]) else 0
    return [f"{number:0{width}d}" for number in range(first, last + 1)]
