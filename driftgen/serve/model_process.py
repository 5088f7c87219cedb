"""The model's process as the server sees it: started, watched, restarted when it is lost."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.serve.batcher import Arrays, Part, UnavailableError
from driftgen.serve.channel import receive, send
from driftgen.serve.model_loop import run_model
from driftgen.serve.served_model import ModelOptions

__all__ = ["ModelProcess", "Process", "spawn"]

LIMIT = 2**22  # bytes that the event loop reads ahead
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0  # seconds before a restart, doubled while restarts fail
STOP_SECONDS = 5.0
SEND_SECONDS = 0.0005  # that a message waits for others; a batch waits for none
READ_SECONDS = 1.0  # to read the last messages of a process that has ended
LOST = "the model's process has ended and is being restarted: try again"


class Process(Protocol):
    """A started process."""

    @property
    def pid(self) -> int | None:
        """Its number."""
        ...

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


def spawn(connection: socket.socket, options: ModelOptions) -> Process:
    """Start a new interpreter that runs the model. A fork would share the state of CUDA and of threads."""
    process = multiprocessing.get_context("spawn").Process(
        target=run_model, args=(connection, asdict(options)), daemon=True, name="driftgen model"
    )
    process.start()
    return process


class ModelProcess:
    """A backend of :class:`~driftgen.serve.batcher.Batcher` in another process.

    Args:
        options: of the model.
        on_lost: called when the process has ended unexpectedly.
        timeout: seconds of a batch after which the process counts as stuck, and is killed.
        start: starts the process with one end of a connection.

    Attributes:
        about: description of the model, once it is loaded.
        ready: the model is loaded and its process alive.
        restarts: number of times that the process was lost.
    """

    def __init__(
        self,
        options: ModelOptions,
        *,
        on_lost: Callable[[], None],
        timeout: float,
        start: Callable[[socket.socket, ModelOptions], Process] = spawn,
    ) -> None:
        self.options, self.timeout = options, timeout
        self.about: dict[str, Any] = {}
        self.ready, self.restarts = False, 0
        self._on_lost, self._start = on_lost, start
        self._process: Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._batches: dict[int, asyncio.Future[NDArray[Any]]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._closed = False
        self._unsent: list[tuple[Mapping[str, Any], Arrays | None]] = []

    @property
    def pid(self) -> int | None:
        """Number of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process and wait until the model is loaded. Raise InputError if it cannot be."""
        reader = await self._connect()
        self._watching = asyncio.create_task(self._watch(reader))

    async def close(self) -> None:
        """End the process."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._end(STOP_SECONDS)

    def add(self, ticket: int, request: Mapping[str, Any], arrays: Arrays) -> None:
        """Announce a request. Raise UnavailableError while there is no process."""
        if not self.ready:
            raise UnavailableError("the model is being restarted: try again", 2)
        self._send({"do": "add", "ticket": ticket, "request": dict(request)}, arrays)

    def drop(self, ticket: int) -> None:
        """Forget a request."""
        if self.ready:
            self._send({"do": "drop", "ticket": ticket})

    async def run(self, parts: Sequence[Part]) -> NDArray[Any]:
        """Compute a batch. Raise UnavailableError if it fails or the process is lost."""
        if not self.ready:
            raise UnavailableError(LOST, 2)
        number = next(self._numbers)
        answer: asyncio.Future[NDArray[Any]] = asyncio.get_running_loop().create_future()
        self._batches[number] = answer
        self._send({"do": "run", "batch": number, "parts": [list(part) for part in parts]})
        self._flush()
        try:
            async with asyncio.timeout(self.timeout):
                return await answer
        except TimeoutError:
            self.ready = False
            if self._process is not None:
                self._process.kill()  # which the watch notices
            raise UnavailableError(
                f"the model did not answer within {self.timeout:g} s and is restarted: try again", 5
            ) from None
        finally:
            self._batches.pop(number, None)

    def _send(self, about: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        """Send a message soon, together with others: each system call costs as much as a small request."""
        self._unsent.append((about, arrays))
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_later(SEND_SECONDS, self._flush)

    def _flush(self) -> None:
        messages, self._unsent = self._unsent, []
        if messages and self._writer is not None and not self._writer.is_closing():
            send(self._writer, messages)

    async def _connect(self) -> asyncio.StreamReader:
        """Start a process and wait for its first message, which describes the model."""
        ours, theirs = socket.socketpair()
        try:
            process = self._process = self._start(theirs, self.options)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=LIMIT)
        # A process that is killed closes its socket. Its own children may still hold a copy of it.
        ended = (process, self._writer, asyncio.get_running_loop())
        threading.Thread(target=self._close_after, args=ended, daemon=True).start()
        try:
            about, _ = await receive(reader)
        except (asyncio.IncompleteReadError, OSError):
            await self._end(STOP_SECONDS)
            raise InputError(
                "the process of the model ended while it loaded: see its messages above"
            ) from None
        except asyncio.CancelledError:
            await self._end(0)
            raise
        if "error" in about:
            await self._end(STOP_SECONDS)
            raise InputError(about["error"])
        self.about, self.ready = about["ready"], True
        return reader

    @staticmethod
    def _close_after(process: Process, writer: asyncio.StreamWriter, loop: asyncio.AbstractEventLoop) -> None:
        process.join()
        try:
            loop.call_soon_threadsafe(loop.call_later, READ_SECONDS, writer.close)
        except RuntimeError:
            return  # the loop has ended

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        while True:
            await self._deliver(reader)
            self._lose()
            reader = await self._restart()

    async def _deliver(self, reader: asyncio.StreamReader) -> None:
        """Hand batches to those who wait for them, until the process is lost."""
        while True:
            try:
                about, arrays = await receive(reader)
            except (asyncio.IncompleteReadError, OSError):
                return
            answer = self._batches.get(about["batch"])
            if answer is None or answer.done():
                continue
            if "failed" in about:
                answer.set_exception(UnavailableError(f"the batch failed ({about['failed']}): try again"))
            else:
                answer.set_result(arrays["rows"])

    def _lose(self) -> None:
        self.ready = False
        self.restarts += 1
        for answer in self._batches.values():
            if not answer.done():
                answer.set_exception(UnavailableError(LOST, 2))
        self._on_lost()
        print("driftgen: the process of the model has ended: restarting it", file=sys.stderr, flush=True)

    async def _restart(self) -> asyncio.StreamReader:
        pause = FIRST_PAUSE
        while True:
            await self._end(0)
            await asyncio.sleep(pause)
            try:
                return await self._connect()
            except (InputError, OSError) as error:  # OSError: no memory or file descriptors for a process
                pause = min(LONGEST_PAUSE, 2 * pause)
                print(f"driftgen: {error}; again in {pause:g} s", file=sys.stderr, flush=True)

    async def _end(self, seconds: float) -> None:
        """Close the connection, which ends the process; kill it if it does not end within ``seconds``."""
        self.ready, self._unsent = False, []
        writer, process = self._writer, self._process
        self._writer = self._process = None
        if writer is not None:
            writer.close()
        if process is not None:
            await asyncio.to_thread(process.join, seconds)
            process.kill()
