"""Files from elsewhere: only regular files are opened, and whatever a parser raises becomes one line.

Parsers raise many types for a damaged file: ``zlib.error``, ``struct.error``, ``tokenize.TokenError``,
``NotImplementedError``, ``RecursionError``. Every loader therefore reads inside :func:`reading`.
"""

from __future__ import annotations

import json
import os
import pickle
import stat
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file

from driftgen.errors import InputError
from driftgen.support.peak_memory import check_fits
from driftgen.support.signals import interruptions
from driftgen.support.sizes import show_size

__all__ = [
    "AGAIN",
    "check_memory",
    "check_regular",
    "described_by",
    "named",
    "open_regular",
    "open_safetensors",
    "parse_json",
    "read_array",
    "read_arrays",
    "read_bytes",
    "read_json",
    "read_tensors",
    "reading",
    "reason",
    "shown",
]

AGAIN = "copy it again"
LONGEST = 200  # characters of a parser's own message
MAX_JSON = 2**28  # bytes
LARGEST_BITS = 1000  # of an integer that has a float


@contextmanager
def reading(path: str | Path, what: str, advice: str = AGAIN) -> Iterator[None]:
    """Turn any exception of a parser into an :class:`InputError` with the file, its format and advice.

    An ``InputError`` passes as it is, and so do ``KeyboardInterrupt`` and ``SystemExit``.

    Args:
        path: the file or folder.
        what: the expected content, such as ``"an array"``.
        advice: what to do.
    """
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError as error:
        missing = error.filename if isinstance(error.filename, str) else path
        raise InputError(f"{missing} does not exist: {advice}") from None
    except Exception as error:
        if interruptions:
            raise KeyboardInterrupt from None
        raise InputError(f"{path} cannot be read as {what} ({reason(error)}): {advice}") from None
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of libraries in Rust, outside Exception
            raise
        raise InputError(f"{path} cannot be read as {what} ({reason(error)}): {advice}") from None


@contextmanager
def described_by(path: str | Path, what: str, advice: str = AGAIN) -> Iterator[None]:
    """Like :func:`reading`, for objects built from values of a file: an ``InputError`` gets its name, too."""
    try:
        with reading(path, what, advice):
            yield
    except InputError as error:
        raise InputError(named(path, error)) from None


def reason(error: BaseException) -> str:
    """Return the message of an error as one line, with its type where the message alone says little."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # A message may quote a long value from the file, or one of several lines.
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        return text[: 4 * LONGEST]
    text = text[:LONGEST]
    if isinstance(error, RecursionError):
        return "values are nested too deeply"
    if isinstance(error, MemoryError):
        return f"out of memory{f', {text}' if text else ''}"
    if isinstance(error, KeyError):
        return f"no {text}"
    return text or type(error).__name__


def shown(value: Any) -> str:
    """Return a value from a file as it is quoted in a message, at most ``LONGEST`` characters of it."""
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def named(path: str | Path, error: Exception) -> str:
    """Return the message of an error, with the file in front if it does not name it."""
    text = reason(error)
    return text if str(path) in text else f"{path}: {text}"


def check_regular(path: str | Path) -> Path:
    """Return the path if it is a regular file; raise at once for anything else.

    Reading a named pipe or a terminal would block, and ``/dev/zero`` has no end.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {reason(error)}") from None
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "named pipe", stat.S_IFSOCK: "socket"}
        kind = kinds.get(stat.S_IFMT(mode), "device")
        raise InputError(f"{path} is a {kind}: give a regular file")
    return Path(path)


def open_regular(path: str | Path) -> BufferedReader:
    """Open a regular file for reading, without ever waiting for the other end of a pipe."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        check_regular(path)  # which names the kind
        raise InputError(f"{path} is no regular file: give one")
    return open(handle, "rb")


def read_bytes(path: str | Path, limit: int | None = None) -> bytes:
    """Read a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise InputError(f"{path} has {show_size(size)}: at most {show_size(limit)} are read")
        return file.read()


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Parse JSON. Whole numbers that no float holds are refused; so are 1e999 and NaN if ``finite``."""
    if finite:
        return json.loads(text, parse_constant=_refuse_number, parse_float=_finite, parse_int=_whole)
    return json.loads(text, parse_int=_whole)


def read_json(path: str | Path, what: str, advice: str = AGAIN, *, finite: bool = True) -> dict[str, Any]:
    """Read a JSON file that holds an object; NaN and infinities are refused if ``finite``."""
    with reading(path, what, advice):
        content = read_bytes(path, MAX_JSON)
        record = parse_json(content, finite=finite)
    if not isinstance(record, dict):
        raise InputError(f"{path} holds no JSON object: {what} is expected; {advice}")
    return record


@contextmanager
def open_safetensors(path: str | Path, what: str, advice: str = AGAIN, device: str = "cpu") -> Iterator[Any]:
    """Open a safetensors file; errors inside the block become one line, too."""
    with reading(path, what, advice), safe_open(check_regular(path), "pt", device) as file:
        yield file


def read_tensors(path: Path, advice: str = AGAIN) -> dict[str, Any]:
    """Read a state dict from ``.safetensors`` or a file of ``torch.save``, whose code is not executed."""
    with reading(path, "a state dict", advice):
        check_regular(path)
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        check_memory(path, path.stat().st_size)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the version of pickle
                content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise InputError(
                f"{path} holds more than tensors, or is damaged: it is not loaded, because that would "
                "execute code in it; save its state_dict as .safetensors"
            ) from None
    if not isinstance(content, Mapping):
        kind = type(content).__name__
        raise InputError(
            f"{path} holds a {kind}, expected a state dict: save only the network's state_dict()"
        )
    return dict(content)


def read_array(path: Path, advice: str = AGAIN) -> NDArray[Any]:
    """Read the array of a ``.npy`` file, after its length was compared with that of the file."""
    with reading(path, "an array", advice), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about headers that Python 2 wrote
        with open_regular(path) as file:
            if file.read(6) != b"\x93NUMPY":
                raise ValueError("not a NumPy array")
            check_memory(path, os.fstat(file.fileno()).st_size)
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        return np.array(mapped)  # a copy: the file may change


def read_arrays(path: Path, names: Collection[str] | None = None, advice: str = AGAIN) -> dict[str, Any]:
    """Read arrays of an ``.npz`` file by name, after their sizes were compared with the memory.

    Args:
        path: the file.
        names: arrays to read if they are stored; all if None.
        advice: what to do about a damaged file.

    Returns:
        The arrays. Those that are not asked for are None.
    """
    with reading(path, "an array", advice), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_regular(path)
        with zipfile.ZipFile(path) as archive:
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in archive.infolist()}
        wanted = [name for name in sizes if names is None or name in names]
        check_memory(path, sum(sizes[name] for name in wanted))
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] if name in wanted else None for name in stored.files}
        for name in wanted:
            if not isinstance(arrays.get(name), np.ndarray):  # NumPy returns the bytes of any other member
                raise ValueError(f"{name} is not a NumPy array")
        return arrays


def check_memory(what: str | Path, size: int) -> None:
    """Raise if ``size`` bytes do not fit into the memory of the machine."""
    check_fits(str(what), size, torch.device("cpu"), "use a part of it, or a larger machine")


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} is not a finite number")


def _whole(text: str) -> int:
    value = int(text)
    if value.bit_length() > LARGEST_BITS:
        raise ValueError(f"{text[:20]}... is too large")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is not a finite number")
    return value
