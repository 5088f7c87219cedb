"""HTTP requests from many clients at once, each counted: answered with a status, or lost.

A small client of its own: libraries take as long for a request as a server for small images, on the same
cores.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import numpy as np

__all__ = ["Body", "Connection", "Load", "closed_loop", "get_json", "hang_up", "open_loop"]

MOST_CONNECTIONS = 1000
PAUSE = 0.25  # seconds after an answer other than 200
Body = Callable[[int], Any]  # of request i


@dataclass
class Load:
    """Outcomes of the requests of a measurement.

    Attributes:
        seconds: from the first request to the last answer.
        statuses: number of answers by status.
        lost: requests without an answer.
        latencies: seconds of each request with status 200.
        retry_after: answers with this header.
    """

    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    lost: int = 0
    latencies: list[float] = field(default_factory=list)
    retry_after: int = 0

    @property
    def requests(self) -> int:
        """Requests that were sent."""
        return sum(self.statuses.values()) + self.lost

    def record(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        figures: dict[str, Any] = {
            "requests": self.requests,
            "seconds": round(self.seconds, 3),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "lost": self.lost,
            "requests_per_second": round(self.statuses[200] / self.seconds, 1) if self.seconds else 0.0,
        }
        if self.latencies:
            median, most, worst = np.quantile(self.latencies, (0.5, 0.99, 1.0))
            figures |= {"p50_seconds": round(float(median), 5), "p99_seconds": round(float(most), 5)}
            figures["max_seconds"] = round(float(worst), 5)
        return figures


class Connection:
    """One connection that stays open between requests."""

    def __init__(self, url: str, token: str | None = None) -> None:
        place = urlsplit(url)
        self.host, self.port = place.hostname or "127.0.0.1", place.port or 80
        self.token = token
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return status, headers and content. Raise OSError or EOFError if it is lost."""
        reader, _ = await self.send(method, path, body)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])
            }
            content = await reader.readexactly(int(headers.get("content-length", 0)))
        except BaseException:
            self.close()
            raise
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split()[1]), headers, content

    async def send(
        self, method: str, path: str, body: Any = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request without waiting for its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self.host, self.port)
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {self.host}:{self.port}"]
        lines.append(f"Content-Length: {len(content)}")
        if self.token is not None:
            lines.append(f"Authorization: Bearer {self.token}")
        try:
            self._streams[1].write("\r\n".join([*lines, "", ""]).encode() + content)
            await self._streams[1].drain()
        except OSError:
            self.close()
            raise
        return self._streams

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def get_json(url: str, path: str) -> Any:
    """Return what a path answers, with any status."""
    connection = Connection(url)
    try:
        return json.loads((await connection.ask("GET", path))[2])
    finally:
        connection.close()


async def _count(connection: Connection, path: str, body: Any, load: Load) -> int | None:
    """Send a request and count its answer; return its status, or None if it is lost."""
    began = time.perf_counter()
    try:
        status, headers, _ = await connection.ask("POST", path, body)
    except (OSError, EOFError):
        load.lost += 1
        return None
    load.statuses[status] += 1
    load.retry_after += "retry-after" in headers
    if status == 200:
        load.latencies.append(time.perf_counter() - began)
    return status


async def closed_loop(
    url: str,
    path: str,
    body: Body,
    *,
    clients: int,
    seconds: float,
    token: str | None = None,
    stop: asyncio.Event | None = None,
) -> Load:
    """Let each of ``clients`` send its next request when the last one is answered, for some seconds.

    A client pauses after an answer other than 200. ``stop`` ends the measurement earlier.
    """
    load, began = Load(), time.perf_counter()
    end = began + seconds

    async def client(number: int) -> None:
        connection, count = Connection(url, token), number
        while time.perf_counter() < end and not (stop is not None and stop.is_set()):
            if await _count(connection, path, body(count), load) != 200:
                await asyncio.sleep(PAUSE)
            count += clients
        connection.close()

    await asyncio.gather(*(client(i) for i in range(clients)))
    load.seconds = time.perf_counter() - began
    return load


async def open_loop(
    url: str, path: str, body: Body, *, rate: float, seconds: float, token: str | None = None
) -> Load:
    """Send ``rate`` requests a second, at random times, whether or not earlier ones are answered."""
    load, began, idle = Load(), time.perf_counter(), list[Connection]()
    times, tasks, clock = random.Random(0), set[asyncio.Task[None]](), began

    async def one(number: int) -> None:
        connection = idle.pop() if idle else Connection(url, token)
        await _count(connection, path, body(number), load)
        idle.append(connection)

    number = 0
    while clock < began + seconds:
        clock += times.expovariate(rate)
        await asyncio.sleep(max(0.0, clock - time.perf_counter()))
        if len(tasks) >= MOST_CONNECTIONS:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - began
    for connection in idle:
        connection.close()
    return load


async def hang_up(url: str, path: str, body: Body, *, clients: int, token: str | None = None) -> None:
    """Send one request from each of ``clients`` and close the connection without waiting for the answer."""

    async def one(number: int) -> None:
        connection = Connection(url, token)
        await connection.send("POST", path, body(number))
        await asyncio.sleep(0.01)
        connection.close()

    await asyncio.gather(*(one(i) for i in range(clients)))
