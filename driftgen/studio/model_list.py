"""Models to choose from: those that ship with the package, then those of runs; and models by their names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from driftgen.errors import InputError
from driftgen.interop.hub import is_hub_name
from driftgen.interop.model_sources import find_model
from driftgen.interop.packaged import FOLDER, find_packaged, packaged_names
from driftgen.interop.run_models import RUN_CONFIG, find_run_model
from driftgen.interop.saved_config import CONFIG, read_config
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.studio.requests_and_answers import ModelEntry
from driftgen.support.user_paths import expand_user
from driftgen.training.run_folder import METRICS

__all__ = ["find_source", "list_models", "list_runs"]

Kind = Literal["generator", "policy", "encoder"]
ENCODERS = ("ResNetMAE", "ConvNeXtV2")
MOST_RUNS = 500
RUN_FILES = (RUN_CONFIG, METRICS, CONFIG)


def list_runs(folders: ReadableFolders) -> list[str]:
    """Return the paths of runs and saved models below the folder of runs, the newest first.

    A run may lie one folder deeper. Links that lead elsewhere and hidden folders are left out.
    """
    found = []
    for path in _candidates(folders.runs):
        times = [_time(path / name) for name in RUN_FILES]
        if max(times) > 0 and folders.contains(path):
            found.append((max(times), path.relative_to(folders.runs).as_posix()))
        if len(found) == MOST_RUNS:
            break
    return [name for _, name in sorted(found, key=lambda entry: (-entry[0], entry[1]))]


def list_models(folders: ReadableFolders, kind: Kind) -> list[ModelEntry]:
    """Return the models of one kind: packaged ones, then those of runs that have saved one."""
    entries = []
    for name in packaged_names():
        if _kind(FOLDER / name) == kind:
            entries.append(ModelEntry(name, f"{name} (ships with driftgen)"))
    for name in list_runs(folders):
        folder = folders.runs / name
        try:
            model = find_run_model(folder) or folder
        except InputError:  # no model yet
            continue
        if folders.contains(model / CONFIG) and _kind(model) == kind:
            entries.append(ModelEntry(str(folder), f"run {name}"))
    return entries


def find_source(name: str, folders: ReadableFolders) -> str:
    """Return the source of a model, see :func:`driftgen.model_io.find_model`.

    A folder must be one that the studio may read, with everything in it.
    """
    text = name.strip()
    if not text:
        raise InputError("no model is chosen: choose one of the list, or type owner/repository")
    packaged = find_packaged(text)
    if packaged is not None:
        return str(packaged)
    if text.startswith("hf://"):
        return text
    path = expand_user(text)
    try:
        exists = os.path.lexists(path)
    except ValueError:
        raise InputError(f"{text!r} is no name of a model") from None
    if exists:
        folders.check(path)
        return str(folders.check_tree(find_model(str(path))))
    if is_hub_name(text):
        return text
    raise InputError(
        f"{text} is no model: choose one of the list, or type owner/repository or hf://name for the Hub"
    )


def _candidates(root: Path) -> Iterator[Path]:
    for path in _folders(root):
        if any((path / name).is_file() for name in RUN_FILES):
            yield path
        else:
            yield from _folders(path)


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            names = sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    except OSError:
        return []
    return [parent / name for name in names]


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _kind(model: Path) -> Kind | None:
    """Return the kind of a saved model; None if its description cannot be read."""
    try:
        architecture = read_config(model).architecture
    except (InputError, OSError):
        return None
    return (
        "policy"
        if architecture == "PolicyNetwork"
        else "encoder"
        if architecture in ENCODERS
        else "generator"
    )
