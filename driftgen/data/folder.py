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
from driftgen.data.augment import change, crop_uniforms
from driftgen.data.classes import choose
from driftgen.errors import InputError

if TYPE_CHECKING:
    from driftgen.data.config import Data

__all__ = ["FolderImages", "list_images"]

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"}
TOLERATED = 0.01  # share of unreadable images
CHUNK = 8  # images per request to a worker


class FolderImages:
    """Images of a folder: every sub-folder is a class, named after it; without any there is one class.

    An image that cannot be read is named in ``unreadable`` and another of its class takes its place, always
    the same. More than 1% of them, and at least two, are an error. Files are looked at when the folder is
    opened; damage further inside shows when they are decoded.

    Args:
        path: the folder. Files of other kinds and hidden ones are passed over.
        config: ``size`` is needed; ``workers`` processes decode, or this one if 0.
    """

    decodes = True

    def __init__(self, path: Path, config: Data) -> None:
        if config.size is None:
            raise InputError("data.size is missing: images of a folder need one size in pixels, such as 64")
        found, numbers, names = list_images(path, config.conditional)
        self.augment, self.channels, self.size = config.augment, config.channels, config.size
        self.shape: tuple[int, int, int] = (config.channels, config.size, config.size)
        self.unreadable: list[str] = []
        self._lock = threading.Lock()
        self._total = len(found)
        self._workers = _Workers(config.workers) if config.workers else None
        try:
            good = self._look(found)
            for number, name in enumerate(names):
                if not (good & (numbers == number)).any():
                    raise InputError(f"none of the images of class {name} in {path} can be read")
            self.labels, self.class_names, kept = choose(numbers[good], names, config)
        except BaseException:
            self.close()
            raise
        self.paths = [found[i] for i in np.flatnonzero(good)[kept]]
        self._instead: dict[int, int] = {}  # unreadable image: the one in its place

    def load(self, indices: Tensor, seed: int, first: int = 0) -> Tensor:
        """See :class:`~driftgen.data.images.RealData`."""
        random = self.augment.crop == "random-resized"
        table = crop_uniforms(seed, first, len(indices)).tolist() if random else None
        out = np.empty((len(indices), self.size, self.size, self.channels), np.uint8)
        which = [self._instead.get(i, i) for i in indices.tolist()]
        todo = list(range(len(which)))
        while todo:
            jobs = [self._job(which[i], table[i] if table else None) for i in todo]
            failed = self._decode(jobs, [out[i] for i in todo])
            todo = [todo[i] for i in failed]
            for i, reason in zip(todo, failed.values(), strict=True):
                which[i] = self._replace(which[i], reason)
        images = to_float(torch.from_numpy(out)).permute(0, 3, 1, 2).contiguous()
        return change(images, self.augment, seed, first)

    def close(self) -> None:
        """Ends the worker processes."""
        if self._workers:
            self._workers.close()

    def _job(self, index: int, uniforms: list[float] | None) -> list[Any]:
        return [self.paths[index], self.size, self.channels, uniforms, self.augment.crop_scale]

    def _decode(self, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]]) -> dict[int, str]:
        """Does the jobs; which of them failed, and why."""
        if self._workers:
            return self._workers.run(jobs, out)
        failed = {}
        for i, job in enumerate(jobs):
            try:
                if len(job) == 1:
                    decode.readable(*job)
                else:
                    out[i][...] = decode.decode(*job)
            except Exception as error:  # whatever a damaged file makes Pillow raise
                failed[i] = decode.reason(error)
        return failed

    def _look(self, found: list[str]) -> NDArray[np.bool_]:
        good = np.ones(len(found), bool)
        for i, reason in self._decode([[path] for path in found], ()).items():
            good[i] = False
            self.unreadable.append(f"{found[i]} ({reason})")
        self._judge()
        return good

    def _replace(self, index: int, reason: str) -> int:
        """The next image of the class, in the order of the folder; beyond the last comes the first."""
        with self._lock:
            if index not in self._instead:
                self.unreadable.append(f"{self.paths[index]} ({reason})")
                self._judge()
                same = (self.labels == self.labels[index]).nonzero()[:, 0]
                place = int((same == index).nonzero()[0])
                others = torch.cat([same[place + 1 :], same[:place]]).tolist()
                good = next((i for i in others if i not in self._instead), None)
                if good is None:
                    name = self.class_names[int(self.labels[index])]
                    raise InputError(f"none of the images of class {name} can be read: {self.unreadable[-1]}")
                self._instead[index] = good
                for bad, other in self._instead.items():
                    if other == index:
                        self._instead[bad] = good
            return self._instead[index]

    def _judge(self) -> None:
        count = len(self.unreadable)
        if count > max(1, TOLERATED * self._total):
            more = f" and {count - 5} more" if count > 5 else ""
            raise InputError(
                f"{count} of {self._total} images cannot be read, more than 1%; mend or remove them: "
                f"{'; '.join(self.unreadable[:5])}{more}"
            )


def list_images(path: Path, conditional: bool = True) -> tuple[list[str], NDArray[np.int64], list[str]]:
    """The image files of a folder in the order of their names, the class of each, and the classes' names."""
    own, folders = [], []
    try:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry)
                elif _is_image(entry.name):
                    own.append(entry.path)
        inside = [_walk(folder.path) for folder in folders]
    except OSError as error:
        raise InputError(f"data.path={path} cannot be read: {error.strerror}") from None
    if not own and not any(inside):
        raise InputError(f"data.path={path} holds no images: {', '.join(sorted(SUFFIXES))} are looked for")
    if not conditional:
        found = own + [file for files in inside for file in files]
        return found, np.zeros(len(found), np.int64), ["all"]
    if not any(inside):
        return own, np.zeros(len(own), np.int64), [path.resolve().name]
    if own:
        raise InputError(
            f"data.path={path} holds images beside class folders, such as {Path(own[0]).name}: move them "
            "into a folder of their class, or set data.conditional=false"
        )
    for folder, files in zip(folders, inside, strict=True):
        if not files:
            raise InputError(f"class folder {folder.path} holds no images: add some, or remove the folder")
    numbers = np.repeat(np.arange(len(inside)), [len(files) for files in inside])
    return [file for files in inside for file in files], numbers, [folder.name for folder in folders]


def _walk(folder: str) -> list[str]:
    files = []
    for place, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [os.path.join(place, name) for name in sorted(names) if _is_image(name)]
    return files


def _raise(error: OSError) -> None:
    raise error


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES


class _Workers:
    """Processes that decode, each asked by a thread of this one.

    They read requests from a pipe and end when it is closed, so they never outlive this process, not even if
    it is killed. They are started as programs of their own, which any script can do without a guard around
    its main part.
    """

    def __init__(self, count: int) -> None:
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all = []
        # -P: the folder of decode.py must not come first on the path, its queue.py would hide Python's own.
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
        self._finalizer = weakref.finalize(self, _end, self._all)

    def run(self, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]]) -> dict[int, str]:
        """Does the jobs; which of them failed, and why."""
        # Looking at a file takes so little that larger requests pay.
        step = CHUNK if out else 64
        parts = [range(i, min(i + step, len(jobs))) for i in range(0, len(jobs), step)]
        failed: dict[int, str] = {}
        for some in self._threads.map(lambda part: self._ask(part, jobs, out), parts):
            failed |= some
        return failed

    def close(self) -> None:
        """Ends them."""
        _end(self._all)
        if hasattr(self, "_threads"):
            self._threads.shutdown(wait=True, cancel_futures=True)

    def _ask(self, part: range, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]]) -> dict[int, str]:
        process = self._free.get()
        try:
            assert process.stdin
            assert process.stdout
            request = json.dumps([jobs[i] for i in part]).encode() + b"\n"
            process.stdin.write(request)
            process.stdin.flush()
            failed = {}
            for i in part:
                length = int.from_bytes(_exactly(process.stdout, 8), "little", signed=True)
                body = _exactly(process.stdout, abs(length))
                if length < 0:
                    failed[i] = body.decode(errors="replace")
                elif length:
                    out[i][...] = np.frombuffer(body, np.uint8).reshape(out[i].shape)
            return failed
        except (EOFError, OSError, ValueError):
            code = process.poll()
            raise InputError(
                f"a worker process ended (exit status {code}) while it decoded {jobs[part[0]][0]} or one of "
                f"the {len(part) - 1} after it: it may lack memory; lower data.workers, or set it to 0 to "
                "find the file"
            ) from None
        finally:
            self._free.put(process)


def _exactly(stream: Any, length: int) -> bytes:
    body: bytes = stream.read(length)
    if len(body) < length:
        raise EOFError
    return body


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
