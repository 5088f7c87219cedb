"""The choice of observations: stored arrays, named as their data set names them, as LeRobot's keys."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.policy.episodes import IMAGE, STATE

__all__ = ["BLOCKPUSH", "PUSHT", "ROBOMIMIC", "choose_keys", "observe"]

# Presets of each layout; the first one is the default. state[:2] stands for a part of an array.
PUSHT: dict[str, tuple[str, ...]] = {
    "keypoints": ("keypoint", "state[:2]"),  # the low-dim task of Diffusion Policy: 9 points, agent position
    "pose": ("state",),  # positions of agent and block, angle of the block
    "image": ("img", "state[:2]"),
}
ROBOMIMIC: dict[str, tuple[str, ...]] = {
    "state": ("object", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
    "image": (
        *("agentview_image", "robot0_eye_in_hand_image"),
        *("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"),
    ),
}
BLOCKPUSH: dict[str, tuple[str, ...]] = {"state": ("obs",)}


def choose_keys(
    wanted: str | None, presets: Mapping[str, tuple[str, ...]], stored: Iterable[str], source: str
) -> tuple[str, ...]:
    """Return the arrays of an observation.

    Args:
        wanted: a preset, array names separated by commas, or None for the first preset.
        presets: array names of each preset.
        stored: arrays that the data set has.
        source: file, named in messages.
    """
    names = sorted(stored)
    if wanted is None or wanted in presets:
        wanted = next(iter(presets)) if wanted is None else wanted
        keys = presets[wanted]
    else:
        keys = tuple(part.strip() for part in wanted.split(",") if part.strip())
    missing = [key for key in keys if _array_name(key) not in names]
    if missing or not keys:
        raise InputError(
            f"{source} has no {missing[0] if missing else 'observation'} for observe={wanted!r}: choose "
            f"{', '.join(presets)} or from the arrays {', '.join(names) or '(none)'}"
        )
    return keys


def observe(keys: Iterable[str], read: Callable[[str], NDArray[Any]], source: str) -> dict[str, NDArray[Any]]:
    """Return observations under LeRobot's keys.

    Vectors are concatenated to ``observation.state`` in the order of ``keys``. A single camera is
    ``observation.image``; several are ``observation.images.NAME``.
    """
    vectors: list[NDArray[np.float32]] = []
    cameras: dict[str, NDArray[Any]] = {}
    for key in keys:
        array = np.asarray(read(_array_name(key)))
        if "[" in key:
            array = _columns(array, key, source)
        if array.ndim == 4:
            cameras[key.removesuffix("_image")] = _to_bytes(array, key, source)
        elif array.ndim >= 1 and array.dtype.kind in "iufb":
            vectors.append(array.reshape(len(array), math.prod(array.shape[1:])).astype(np.float32))
        else:
            raise InputError(
                f"{source}: {key} has shape {list(array.shape)} and dtype {array.dtype}, expected numbers"
            )
    observations: dict[str, NDArray[Any]] = {}
    if vectors:
        counts = {len(vector) for vector in vectors}
        if len(counts) > 1:
            raise InputError(
                f"{source}: the observations have {', '.join(map(str, sorted(counts)))} steps: store as many "
                "of each"
            )
        observations[STATE] = np.concatenate(vectors, axis=1)
    for name, pixels in cameras.items():
        observations[IMAGE if len(cameras) == 1 else f"observation.images.{name}"] = pixels
    return observations


def _array_name(key: str) -> str:
    return key.partition("[")[0]


def _columns(array: NDArray[Any], key: str, source: str) -> NDArray[Any]:
    """Return the first columns of an array, for a key such as ``state[:2]``."""
    count, name = re.fullmatch(r"[^[]*\[:([1-9]\d{0,8})\]", key), _array_name(key)
    if count is None or array.ndim != 2 or int(count[1]) > array.shape[1]:
        raise InputError(
            f"{source}: {key} names no columns of {name}, which has shape {list(array.shape)}: write "
            f"{name}[:2] for the first two columns of an array [steps, columns]"
        )
    return array[:, : int(count[1])]


def _to_bytes(array: NDArray[Any], key: str, source: str) -> NDArray[np.uint8]:
    """Return frames as uint8. Diffusion Policy stores 0 ... 255 as floats, too."""
    if array.dtype == np.uint8:
        return array
    # One frame of every hundred tells the range; converting needs no second copy of all frames.
    sample = array[:: max(1, len(array) // 100)]
    low, high = float(sample.min()), float(sample.max())
    if array.dtype.kind not in "iuf" or not (low >= 0 and 1 < high <= 255):
        raise InputError(
            f"{source}: {key} has dtype {array.dtype} and values {low:g} to {high:g}, expected 0 to 255"
        )
    return array.astype(np.uint8)
