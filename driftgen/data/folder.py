"""Folders of image files, decoded by worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftgen.data import decode
from driftgen.data.arrays import to_float
from driftgen.data.augment import crop_uniforms, flip_and_warp
from driftgen.data.classes import choose
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["FolderImages", "list_images"]

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
TOLERATED = 0.01  # fraction of unreadable images
CHUNK = 8  # images per request to a worker


class FolderImages:
    """Images of a folder. Every subfolder is a class of that name; without subfolders there is one class.

    An unreadable image is listed in ``unreadable`` and always replaced by the same other image of its class.
    At least two unreadable images that are more than 1% of all are an error. Opening the folder checks the
    header of every file; decoding finds damage beyond the header.

    Args:
        path: the folder. Hidden files and files of other types are ignored.
        config: ``size`` is required. ``workers`` processes decode, or the current process if 0.
    """

    decodes = True

    def __init__(self, path: Path, config: Data) -> None:
        if config.size is None:
            raise InputError("data.size is missing: set the side of the images in pixels, such as 64")
        files, labels, names = list_images(path, config.conditional)
        self.augment, self.channels, self.size = config.augment, config.channels, config.size
        self.shape: tuple[int, int, int] = (config.channels, config.size, config.size)
        self.unreadable: list[str] = []
        self._lock = threading.Lock()
        self._total = len(files)
        self._workers = _Workers(config.workers) if config.workers else None
        try:
            readable = self._check_headers(files)
            for label, name in enumerate(names):
                if not (readable & (labels == label)).any():
                    raise InputError(
                        f"none of the images of class {name} in {path} can be read: repair or remove them"
                    )
            self.labels, self.class_names, chosen = choose(labels[readable], names, config)
        except BaseException:
            self.close()
            raise
        self.paths = [files[i] for i in np.flatnonzero(readable)[chosen]]
        self._replacements: dict[int, int] = {}  # index of an unreadable image -> index of its replacement

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """Load images in [-1, 1]; see :class:`~driftgen.data.images.RealData`."""
        random = self.augment.crop == "random-resized"
        table = crop_uniforms(seed, first, len(indices)).tolist() if random else None
        out = np.empty((len(indices), self.size, self.size, self.channels), np.uint8)
        sources = [self._replacements.get(i, i) for i in indices.tolist()]
        pending = list(range(len(sources)))
        while pending:
            jobs = [self._job(sources[i], table[i] if table else None) for i in pending]
            failed = self._decode(jobs, [out[i] for i in pending])
            pending = [pending[i] for i in failed]
            for i, reason in zip(pending, failed.values(), strict=True):
                sources[i] = self._replace(sources[i], reason)
        images = to_float(torch.from_numpy(out)).permute(0, 3, 1, 2).contiguous()
        return flip_and_warp(images, self.augment, seed, first)

    def close(self) -> None:
        """Stop the worker processes."""
        if self._workers:
            self._workers.close()

    def _job(self, index: int, uniforms: list[float] | None) -> list[Any]:
        return [self.paths[index], self.size, self.channels, uniforms, self.augment.crop_scale]

    def _decode(self, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]]) -> dict[int, str]:
        """Run the jobs; return the error message of each job that failed."""
        if self._workers:
            return self._workers.run(jobs, out)
        failed = {}
        for i, job in enumerate(jobs):
            try:
                if len(job) == 1:
                    decode.readable(*job)
                else:
                    out[i][...] = decode.decode(*job)
            except Exception as error:  # Pillow raises many types for damaged files
                failed[i] = decode.reason(error)
        return failed

    def _check_headers(self, files: list[str]) -> NDArray[np.bool_]:
        readable = np.ones(len(files), bool)
        for i, reason in self._decode([[path] for path in files], ()).items():
            readable[i] = False
            self.unreadable.append(f"{files[i]} ({reason})")
        self._check_unreadable()
        return readable

    def _replace(self, index: int, reason: str) -> int:
        """Return the next readable image of the class in folder order, wrapping around at the end."""
        with self._lock:
            if index not in self._replacements:
                self.unreadable.append(f"{self.paths[index]} ({reason})")
                self._check_unreadable()
                same_class = (self.labels == self.labels[index]).nonzero()[:, 0]
                position = int((same_class == index).nonzero()[0])
                others = torch.cat([same_class[position + 1 :], same_class[:position]]).tolist()
                replacement = next((i for i in others if i not in self._replacements), None)
                if replacement is None:
                    name = self.class_names[int(self.labels[index])]
                    raise InputError(f"none of the images of class {name} can be read: {self.unreadable[-1]}")
                self._replacements[index] = replacement
                for unreadable, other in self._replacements.items():
                    if other == index:
                        self._replacements[unreadable] = replacement
            return self._replacements[index]

    def _check_unreadable(self) -> None:
        count = len(self.unreadable)
        if count > max(1, TOLERATED * self._total):
            more = f" and {count - 5} more" if count > 5 else ""
            raise InputError(
                f"{count} of {self._total} images cannot be read, more than 1%; repair or remove them: "
                f"{'; '.join(self.unreadable[:5])}{more}"
            )


def list_images(path: Path, conditional: bool = True) -> tuple[list[str], NDArray[np.int64], list[str]]:
    """Return the image files of a folder in name order, the label of each, and the class names."""
    top_level, folders = [], []
    try:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry)
                elif _is_image(entry.name):
                    top_level.append(entry.path)
        by_folder = [_walk(folder.path) for folder in folders]
    except OSError as error:
        raise InputError(
            f"data.path={path} cannot be read: {error.strerror}; check its permissions"
        ) from None
    if not top_level and not any(by_folder):
        raise InputError(f"data.path={path} holds no images: supported are {', '.join(sorted(SUFFIXES))}")
    if not conditional:
        everything = top_level + [file for files in by_folder for file in files]
        return everything, np.zeros(len(everything), np.int64), ["all"]
    if not any(by_folder):
        return top_level, np.zeros(len(top_level), np.int64), [path.resolve().name]
    if top_level:
        raise InputError(
            f"data.path={path} holds images beside class folders, such as {Path(top_level[0]).name}: move "
            "them into a folder of their class, or set data.conditional=false"
        )
    for folder, files in zip(folders, by_folder, strict=True):
        if not files:
            raise InputError(f"class folder {folder.path} holds no images: add some, or remove the folder")
    labels = np.repeat(np.arange(len(by_folder)), [len(files) for files in by_folder])
    return [file for files in by_folder for file in files], labels, [folder.name for folder in folders]


def _walk(folder: str) -> list[str]:
    files = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(parent, name) for name in sorted(names) if _is_image(name)]
    return files


def _raise(error: OSError) -> None:
    raise error


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


class _Workers:
    """Decoding processes, each driven by a thread of the current process.

    A worker reads requests from a pipe and exits when the pipe is closed, so it never outlives the current
    process, even if that is killed. Workers are separate programs, so scripts need no ``__main__`` guard.
    """

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all = []
        # -P keeps the folder of decode.py off sys.path: its queue.py would shadow the standard library's.
        command = [sys.executable, "-P", str(Path(decode.__file__))]
        try:
            for _ in range(count):
                self._all.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        except OSError as error:
            self.close()
            raise InputError(
                f"worker process {len(self._all) + 1} cannot be started ({error.strerror}): "
                "lower data.workers"
            ) from None
        for process in self._all:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="driftgen-decode")
        self._finalizer = weakref.finalize(self, _stop, self._all)

    def run(self, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]]) -> dict[int, str]:
        """Run the jobs; return the error message of each job that failed."""
        # Checking a header is so cheap that larger requests pay off.
        step = CHUNK if out else 64
        parts = [range(i, min(i + step, len(jobs))) for i in range(0, len(jobs), step)]
        failed: dict[int, str] = {}
        for failed_part in self._threads.map(lambda part: self._request(part, jobs, out), parts):
            failed |= failed_part
        return failed

    def close(self) -> None:
        """Stop the workers."""
        _stop(self._all)
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _request(
        self, part: range, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]]
    ) -> dict[int, str]:
        process = self._free.get()
        try:
            assert process.stdin
            assert process.stdout
            request = json.dumps([jobs[i] for i in part]).encode() + b"\n"
            process.stdin.write(request)
            process.stdin.flush()
            failed = {}
            for i in part:
                length = int.from_bytes(_read_exactly(process.stdout, 8), "little", signed=True)
                body = _read_exactly(process.stdout, abs(length))
                if length < 0:
                    failed[i] = body.decode(errors="replace")
                elif length:
                    out[i][...] = np.frombuffer(body, np.uint8).reshape(out[i].shape)
            return failed
        except (EOFError, OSError, ValueError):
            code = process.poll()
            raise InputError(
                f"a worker process ended (exit status {code}) while it decoded {jobs[part[0]][0]} or one of "
                f"the next {len(part) - 1} files, perhaps out of memory: lower data.workers, or set "
                "data.workers=0 to find the file"
            ) from None
        finally:
            self._free.put(process)


def _read_exactly(stream: Any, length: int) -> bytes:
    body: bytes = stream.read(length)
    if len(body) < length:
        raise EOFError
    return body


def _stop(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
