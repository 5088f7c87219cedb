"""Sizes of the recipes for a user's own images: sets of changes that fit a machine, as data in YAML."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from driftgen.errors import InputError
from driftgen.support.yaml_files import read_mapping

__all__ = [
    "SIZED",
    "SIZES",
    "Choice",
    "choose_size",
    "few_images",
    "few_images_limit",
    "size_note",
    "size_overrides",
    "size_start",
    "size_time",
]

SIZED = ("folder", "mae-folder")  # recipes that have sizes
SIZES = ("auto", "tiny", "small", "base")
FILE = Path(__file__).parent / "recipes" / "sizes" / "folder.yaml"
FEW = "few_images"
SMALL_GPU = 12 * 2**30  # bytes of memory below which a GPU gets ``small``
MANY_CORES = 8  # below, ``small`` is not even measured
PATIENCE = 4 * 3600.0  # seconds that ``small`` may take on a CPU, encoder and generator together


class Choice(NamedTuple):
    """An automatic choice and its reason, one line each."""

    value: str
    reason: str


def size_overrides(recipe: str, size: str, init: str | None = None) -> list[str]:
    """Return the changes that a size makes to a recipe, as ``key=value`` with the value in JSON.

    ``init`` is the model whose weights and generator a run starts from: such runs have values of their own.
    """
    if recipe not in SIZED:
        raise InputError(f"size={size}: the recipe {recipe} has one size; {' and '.join(SIZED)} have several")
    if size not in SIZES[1:]:
        raise InputError(f"size={size} is not known: choose from {', '.join(SIZES)}")
    started = {} if init is None else _read()[size].get("init", {})
    return _overrides(_read()[size].get(recipe, {})) + _overrides(started.get(recipe, {}))


def few_images(recipe: str) -> list[str]:
    """Return the changes for datasets with few images per class: augmentation against memorization."""
    return _overrides(_read()[FEW].get(recipe, {}))


def few_images_limit(size: str | None = None) -> int:
    """Return the number of images in a class below which :func:`few_images` applies at a size."""
    below = _read()[FEW]["below"]
    return int(below if size is None else _read()[size].get("few_images_below", below))


def size_note(size: str, init: str | None = None) -> str:
    """Return what to expect of a size."""
    if init is not None and init != size_start(size):
        return f"What to expect depends on {init}."
    return str(_of_init(size, init)["expect"])


def size_time(size: str, init: str | None = None) -> str:
    """Return how long a size takes, encoder and generator together; "" if its file does not say."""
    if init is not None and init != size_start(size):
        return ""
    return str(_of_init(size, init).get("time", ""))


def size_start(size: str) -> str | None:
    """Return the model whose weights a run of a size starts from; None for random weights."""
    start: str | None = _read()[size].get("start")
    return start


def choose_size(
    device: torch.device,
    measure: Callable[[str], float] | None,
    cores: int | None = None,
    memory: int | None = None,
) -> Choice:
    """Choose a size for a machine.

    Args:
        device: of the run.
        measure: returns the seconds that a size takes, encoder and generator together; called for ``small``
            on a CPU with many cores. None if there are no data to measure with.
        cores: number of CPU cores; those that this process may use if None.
        memory: bytes of the GPU; those of ``device`` if None.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory if memory is None else memory
        name = f"one GPU with {total / 2**30:.0f} GiB"
        return Choice("small" if total < SMALL_GPU else "base", name)
    count = cores or usable_cores()
    reason = f"no GPU, {count} CPU core{'s' if count > 1 else ''}"
    if count < MANY_CORES:
        return Choice("tiny", reason)
    if measure is None:
        return Choice("tiny", f"{reason}; small is considered once data.path is set")
    seconds = measure("small")
    fits = seconds <= PATIENCE
    return Choice(
        "small" if fits else "tiny",
        f"{reason}; small would take {seconds / 3600:.1f} hours, {'within' if fits else 'above'} the limit "
        f"of {PATIENCE / 3600:g}",
    )


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _of_init(size: str, init: str | None) -> dict[str, Any]:
    """Return the facts of a size: from random weights, or from the model that it starts from."""
    facts: dict[str, Any] = _read()[size]
    return facts if init is None else facts["init"]


def _overrides(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


@cache
def _read() -> dict[str, Any]:
    return read_mapping(FILE)
