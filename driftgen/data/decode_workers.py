"""Processes that decode images, driven from the training process."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.data import decode
from driftgen.errors import InputError

__all__ = ["DecodeWorkers"]

CHUNK = 8  # images per request to a worker


class DecodeWorkers:
    """Decoding processes, each driven by a thread of the current process.

    A worker reads requests from a pipe and exits when the pipe is closed, so it never outlives the current
    process, even if that is killed. Workers are separate programs, so scripts need no ``__main__`` guard.
    They start with the first request, also after :meth:`close`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._threads: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._all)

    def run(
        self, jobs: list[list[Any]], out: Sequence[NDArray[np.uint8]], names: Sequence[str]
    ) -> dict[int, str]:
        """Run jobs of :func:`driftgen.data.decode.serve`; return the error message of each that failed.

        ``names`` of the images are for error messages.
        """
        # Checking a header is so cheap that larger requests pay off.
        step = CHUNK if out else 64
        parts = [range(i, min(i + step, len(jobs))) for i in range(0, len(jobs), step)]
        failed: dict[int, str] = {}
        threads = self._start()
        for failed_part in threads.map(lambda part: self._request(part, jobs, out, names), parts):
            failed |= failed_part
        return failed

    def close(self) -> None:
        """Stop the workers."""
        with self._starting:
            _stop(self._all)
            if self._threads is not None:
                self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads, self._free = None, queue.SimpleQueue()
            self._all.clear()

    def _start(self) -> ThreadPoolExecutor:
        with self._starting:
            if self._threads is not None:
                return self._threads
            # -P keeps the folder of decode.py off sys.path: its queue.py would shadow the standard library's.
            command = [sys.executable, "-P", str(Path(decode.__file__))]
            try:
                for _ in range(self._count):
                    self._all.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            except OSError as error:
                started = len(self._all)
                _stop(self._all)
                self._all.clear()
                raise InputError(
                    f"worker process {started + 1} cannot be started ({error.strerror}): lower data.workers"
                ) from None
            for process in self._all:
                self._free.put(process)
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="driftgen-decode")
            return self._threads

    def _request(
        self,
        part: range,
        jobs: list[list[Any]],
        out: Sequence[NDArray[np.uint8]],
        names: Sequence[str],
    ) -> dict[int, str]:
        free = self._free
        process = free.get()
        try:
            assert process.stdin
            assert process.stdout
            process.stdin.write(_encode_request([jobs[i] for i in part]))
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
                f"a worker process ended (exit status {code}) while it decoded {names[part[0]]} or one of "
                f"the next {len(part) - 1} images, perhaps out of memory: lower data.workers, or set "
                "data.workers=0 to find the image"
            ) from None
        finally:
            free.put(process)


def _encode_request(jobs: list[list[Any]]) -> bytes:
    """Return the JSON line of a request and the bytes of its images, as ``decode.serve`` reads them."""
    bodies = [job[0] for job in jobs if isinstance(job[0], bytes)]
    listed = [[len(job[0]), *job[1:]] if isinstance(job[0], bytes) else job for job in jobs]
    return b"".join([json.dumps(listed).encode(), b"\n", *bodies])


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
