"""Gather requests into batches: a bounded queue in order of arrival. No web framework and no model in it.

All methods belong to one event loop. A request of n rows (images) may be split between batches, and a batch
holds rows of many requests.

When a batch begins:

- While the model is idle, the first request starts one at once, or waits up to ``window`` seconds if the
  batch before had more rows: so a single client never waits for others, and many clients share batches.
- While the model computes, requests gather. A full batch is handed over during that time, so that the model
  goes from one to the next. A partial one would only grow smaller by that.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Arrays", "Backend", "Batcher", "OverloadedError", "Part", "Ticket", "UnavailableError"]

Part = tuple[int, int, int]  # number of a ticket, its first row, the row after its last one
Arrays = Mapping[str, NDArray[Any]]
MOST_SECONDS = 60  # of a proposal when to retry


class OverloadedError(Exception):
    """The queue is full. ``retry_after`` is the time in seconds until it may have room."""

    def __init__(self, waiting: int, retry_after: int) -> None:
        super().__init__(
            f"the queue is full ({waiting} images or actions wait): try again in {retry_after} s"
        )
        self.retry_after = retry_after


class UnavailableError(Exception):
    """The model cannot answer now. ``retry_after`` is the time in seconds until it may."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Backend(Protocol):
    """The model, in whatever process it is."""

    def add(self, ticket: int, request: Mapping[str, Any], arrays: Arrays) -> None:
        """Announce a request, so that its noise is drawn before its batch begins."""
        ...

    def drop(self, ticket: int) -> None:
        """Forget a request that is no longer wanted."""
        ...

    async def run(self, parts: Sequence[Part]) -> NDArray[Any]:
        """Compute rows of announced requests, in this order."""
        ...


@dataclass(eq=False)
class Ticket:
    """A request in the queue or at work.

    Attributes:
        number: its name for the backend.
        rows: results that it asks for.
        result: becomes the array of all rows.
        started: rows that are computed or are being computed.
    """

    number: int
    rows: int
    result: asyncio.Future[NDArray[Any]]
    started: int = 0
    pieces: list[NDArray[Any]] = field(default_factory=list)


class Batcher:
    """Hands the rows of requests to a backend in batches.

    Args:
        backend: computes batches.
        largest: rows of a full batch; 1 computes one row at a time.
        window: seconds that a first request may wait for others.
        most_waiting: rows that may wait; a request beyond that is refused.

    Attributes:
        waiting: rows in the queue.
        running: batches at work.
        sizes: number of batches by their rows.
    """

    def __init__(self, backend: Backend, *, largest: int, window: float, most_waiting: int) -> None:
        self.backend, self.largest, self.window, self.most_waiting = backend, largest, window, most_waiting
        self.waiting = self.running = 0
        self.sizes: Counter[int] = Counter()
        self._queue: deque[Ticket] = deque()
        self._numbers = itertools.count()
        self._expected = 1  # rows of the batch before
        self._seconds_per_row = 0.0
        self._changed = asyncio.Event()
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_task = asyncio.create_task(self._dispatch())

    def submit(self, rows: int, request: Mapping[str, Any], arrays: Arrays | None = None) -> Ticket:
        """Put a request into the queue. Raise OverloadedError if it has no room."""
        self.check_room(rows)
        ticket = Ticket(next(self._numbers), rows, asyncio.get_running_loop().create_future())
        self.backend.add(ticket.number, request, arrays or {})
        self._queue.append(ticket)
        self.waiting += rows
        self._changed.set()
        return ticket

    def check_room(self, rows: int = 1) -> None:
        """Raise OverloadedError if a request of ``rows`` rows would be refused."""
        if self._closed:
            raise UnavailableError("the server is shutting down")
        if self.waiting + rows > self.most_waiting:
            raise OverloadedError(self.waiting, self.retry_after())

    def cancel(self, ticket: Ticket) -> None:
        """Take a request out of the queue, for a client that has hung up. Nothing happens if it is done."""
        if not ticket.result.done():
            ticket.result.cancel()
            self._leave(ticket)

    def fail_all(self, error: Exception) -> None:
        """Answer all requests of the queue with an error."""
        for ticket in list(self._queue):
            self._fail(ticket, error)

    def retry_after(self) -> int:
        """Return the seconds until the rows that wait now are computed, from 1 to 60."""
        return min(MOST_SECONDS, max(1, math.ceil(self.waiting * self._seconds_per_row)))

    async def close(self) -> None:
        """Refuse new requests, finish those that were accepted, and end."""
        self._closed = True
        self._changed.set()
        await self._loop_task
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _dispatch(self) -> None:
        while True:
            await self._until_work()
            if not self._queue:
                return  # closed
            if not self.running and not self._closed:
                await self._gather()
            parts = self._take()
            if parts:  # clients may have hung up meanwhile
                self._expected = sum(stop - start for _, start, stop in parts)
                self.sizes[self._expected] += 1
                self.running += 1
                task = asyncio.create_task(self._run(parts))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _until_work(self) -> None:
        """Wait until a batch can begin, or until the batcher is closed and empty."""
        while True:
            most = 2 if self.waiting >= self.largest else 1
            if (self._queue and self.running < most) or (self._closed and not self._queue):
                return
            self._changed.clear()
            await self._changed.wait()

    async def _gather(self) -> None:
        """Wait for as many rows as the batch before had, for a few milliseconds at most."""
        goal = min(self.largest, self._expected)
        end = asyncio.get_running_loop().time() + self.window
        while self.waiting < goal and self._queue and not self._closed:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(end):
                    await self._changed.wait()
            except TimeoutError:
                return

    def _take(self) -> list[tuple[Ticket, int, int]]:
        parts, room = [], self.largest
        while room and self._queue:
            ticket = self._queue[0]
            start = ticket.started
            ticket.started = min(ticket.rows, start + room)
            if ticket.started == ticket.rows:
                self._queue.popleft()
            room -= ticket.started - start
            self.waiting -= ticket.started - start
            parts.append((ticket, start, ticket.started))
        return parts

    async def _run(self, parts: Sequence[tuple[Ticket, int, int]]) -> None:
        loop = asyncio.get_running_loop()
        began, count = loop.time(), sum(stop - start for _, start, stop in parts)
        try:
            rows = await self.backend.run([(ticket.number, start, stop) for ticket, start, stop in parts])
        except Exception as error:
            for ticket, _, _ in parts:
                self._fail(ticket, error)
        else:
            seconds = (loop.time() - began) / count
            self._seconds_per_row = seconds if not self._seconds_per_row else (
                0.8 * self._seconds_per_row + 0.2 * seconds
            )  # fmt: skip
            first = 0
            for ticket, start, stop in parts:
                self._finish(ticket, rows[first : first + stop - start])
                first += stop - start
        finally:
            self.running -= 1
            self._changed.set()

    def _finish(self, ticket: Ticket, rows: NDArray[Any]) -> None:
        """Add computed rows to a request, whose batches end in the order in which they began."""
        ticket.pieces.append(rows)
        if not ticket.result.done() and sum(map(len, ticket.pieces)) == ticket.rows:
            ticket.result.set_result(
                ticket.pieces[0] if len(ticket.pieces) == 1 else np.concatenate(ticket.pieces)
            )

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        if not ticket.result.done():
            ticket.result.set_exception(error)
            self._leave(ticket)

    def _leave(self, ticket: Ticket) -> None:
        """Free the place of a request that ends early."""
        if ticket in self._queue:
            self._queue.remove(ticket)
            self.waiting -= ticket.rows - ticket.started
        self.backend.drop(ticket.number)
        self._changed.set()
