"""Observations of a request as arrays: nested lists, raw bytes, or image files in base64."""

from __future__ import annotations

import base64
import binascii
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.support.checked_arguments import show_value

__all__ = ["parse_observation"]

DTYPES = ("float32", "float64", "uint8", "int64")
MOST_AXES = 8  # of an array: the product of a long list of sizes takes hours
Array = NDArray[Any]


def parse_observation(
    observation: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], observed: int
) -> dict[str, Array]:
    """Return the history ``[observed, ...]`` of each key: float32 for states, uint8 for images.

    Args:
        observation: values of a request by key; further keys are ignored.
        shapes: of one step by key, which the policy observes.
        observed: steps of a history. A value of one step stands for all of them, as at the start of an
            episode.
    """
    result = {}
    for key, shape in shapes.items():
        if key not in observation:
            given = ", ".join(sorted(observation)[:8])[:200] or "none"
            raise InputError(f"{key} is missing: the policy observes {', '.join(shapes)}; got {given}")
        image = len(shape) == 3
        array = _array(key, observation[key], shape, image)
        if image and array.ndim >= 3 and tuple(array.shape[-3:]) != tuple(shape):
            array = np.moveaxis(array, -3, -1)  # LeRobot has channels first
        if tuple(array.shape) == tuple(shape):
            array = np.broadcast_to(array, (observed, *shape))
        if tuple(array.shape) != (observed, *shape):
            size = ", ".join(map(str, shape))
            raise InputError(
                f"{key} has shape {list(array.shape)}, expected [{size}] or [{observed}, {size}]"
            )
        with np.errstate(over="ignore"):
            values = array.astype(np.float32)
        if not np.isfinite(values).all():
            raise InputError(f"{key} contains NaN or infinite values")
        result[key] = _pixels(key, array) if image else values
    return result


def _array(key: str, value: Any, shape: Sequence[int], image: bool) -> Array:
    if isinstance(value, dict):
        return _raw(key, value)
    if image and isinstance(value, str):
        return _decoded(key, value, shape)
    if image and isinstance(value, list) and value and all(isinstance(step, str) for step in value):
        return np.stack([_decoded(key, step, shape) for step in value])
    # As objects first: NumPy would pad all texts of a list to the longest one.
    try:
        numbers = set(map(type, np.array(value, dtype=object).ravel())) <= {int, float}
        array = np.array(value if numbers else None)
    except (ValueError, OverflowError):
        array = np.array(None)
    if array.dtype.kind not in "iuf":
        raise InputError(f"{key}={show_value(value)} must be nested lists of numbers, all of one length")
    return array


def _raw(key: str, value: Mapping[str, Any]) -> Array:
    """Read ``{"data": base64, "dtype": ..., "shape": [...]}``, little-endian."""
    if value.keys() != {"data", "dtype", "shape"}:
        raise InputError(f"{key} must have data, dtype and shape, got {', '.join(map(str, value))[:100]}")
    dtype, shape = value["dtype"], value["shape"]
    if dtype not in DTYPES:
        raise InputError(f"{key}: dtype={show_value(dtype)} must be one of {', '.join(DTYPES)}")
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_AXES
        or not all(type(n) is int and 0 < n < 2**20 for n in shape)
    ):
        raise InputError(
            f"{key}: shape={show_value(shape)} must be a list of at most {MOST_AXES} whole numbers"
        )
    data, kind = _bytes(key, value["data"]), np.dtype(dtype).newbyteorder("<")
    if len(data) != math.prod(shape) * kind.itemsize:
        raise InputError(
            f"{key}: data has {len(data)} bytes, shape and dtype need {math.prod(shape) * kind.itemsize}"
        )
    return np.frombuffer(data, kind).reshape(shape)


def _decoded(key: str, text: str, shape: Sequence[int]) -> Array:
    """Decode a PNG or JPEG file of the camera's size."""
    from PIL import Image

    from driftgen.support.image_files import open_image

    data = _bytes(key, text.partition(",")[2] if text.startswith("data:") else text)
    try:
        with open_image(io.BytesIO(data), ("PNG", "JPEG")) as picture:
            if picture.size != (shape[1], shape[0]):  # before anything of that size is decoded
                raise InputError(
                    f"{key} is {picture.size[0]}x{picture.size[1]} pixels, expected {shape[1]}x{shape[0]}"
                )
            return np.asarray(picture.convert("RGB"))
    except InputError:
        raise
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise InputError(f"{key} cannot be read as a PNG or JPEG file") from None


def _bytes(key: str, text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise InputError(f"{key} is no base64") from None


def _pixels(key: str, array: Array) -> NDArray[np.uint8]:
    """Return bytes; floats from 0 to 1 are scaled."""
    low, high = float(array.min()), float(array.max())
    most = 1 if array.dtype.kind == "f" else 255
    if low < 0 or high > most:
        raise InputError(f"{key} has values from {low:g} to {high:g}: give bytes, or numbers from 0.0 to 1.0")
    return np.rint(array * 255).astype(np.uint8) if most == 1 else array.astype(np.uint8)
