"""``driftgen bench serve``: requests per second and latencies of a server, and what it does under faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from driftgen.bench.http_load import Body, Connection, Load, closed_loop, get_json, hang_up, open_loop
from driftgen.errors import InputError

__all__ = [
    "EVALUATOR",
    "FAULTS",
    "MODES",
    "Plan",
    "measure_faults",
    "measure_modes",
    "show_row",
    "started_server",
]

MODES = {"batched": (), "one at a time": ("--batch-size", "1", "--window", "0")}
FAULTS = ("overload", "killed model", "hang-ups", "SIGTERM")
START_SECONDS = 600.0  # of a server that compiles
LONGEST = 300.0  # seconds to wait for a restart
RATE = 2.0  # of an overload, to what the server can do
EVALUATOR = (
    "clients, server and model on one machine, over loopback; a client sends its next request when the last "
    "one is answered; latencies of requests with status 200; lost: requests without an answer"
)


@dataclass(frozen=True)
class Plan:
    """Options of a measurement.

    Attributes:
        model: as in ``driftgen serve``.
        options: further words of that command.
        clients: numbers of clients that send requests at once.
        seconds: of each measurement.
        images: per request.
    """

    model: str
    options: tuple[str, ...] = ()
    clients: tuple[int, ...] = (1, 16, 64, 256)
    seconds: float = 5.0
    images: int = 1


@dataclass(frozen=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    path: str
    body: Body


@contextmanager
def started_server(plan: Plan, words: Sequence[str] = ()) -> Iterator[Server]:
    """Start ``driftgen serve`` on a free port, and end it after the block."""
    command = [sys.executable, "-m", "driftgen", "serve", plan.model, "--port", "0", *plan.options, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if " at http" not in line:
            process.wait(START_SECONDS)
            why = process.stderr.read().strip().splitlines() or ["no message"]
            raise InputError(why[-1].removeprefix("driftgen: error: "))
        url = line.split(" at ")[1].split()[0]
        about = asyncio.run(get_json(url, "/healthz"))
        yield Server(process, url, *_requests(about, plan.images))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def _requests(about: dict[str, Any], images: int) -> tuple[str, Body]:
    """Return the path that a model is asked at, and the body of request i."""
    if about["kind"] == "images":
        return "/v1/images", lambda i: {"seed": i, "number": images}
    observation = {key: np.zeros(shape, int).tolist() for key, shape in about["observations"].items()}
    return "/v1/actions", lambda i: {"seed": i, "observation": observation}


def measure_modes(plan: Plan, on_row: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Measure each number of clients, with batches and one request at a time."""
    rows = []
    for mode, words in MODES.items():
        with started_server(plan, words) as server:
            asyncio.run(closed_loop(server.url, server.path, server.body, clients=4, seconds=0.5))
            for clients in plan.clients:
                load = asyncio.run(
                    closed_loop(server.url, server.path, server.body, clients=clients, seconds=plan.seconds)
                )
                rows.append({"mode": mode, "clients": clients} | load.record())
                on_row(rows[-1])
    return rows


def measure_faults(plan: Plan, on_row: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """Overload a server, kill its model, hang up on it, and stop it, each while clients send requests.

    ``lost`` of a row counts requests that got no answer, which no fault may cause.
    """
    rows = []
    clients = 64
    for fault in FAULTS:
        # A short queue, so that it fills; a full one holds some seconds of work otherwise.
        words = ("--queue", str(clients * plan.images), "--max-images", str(plan.images))
        with started_server(plan, words) as server:
            load, more = _FAULTS[fault](server, clients, plan.seconds)
            row = {"fault": fault} | load.record() | {"retry_after": load.retry_after} | more
        row["exit_code"] = server.process.returncode
        rows.append(row)
        on_row(row)
    return rows


def show_row(row: dict[str, Any]) -> str:
    """Return a row in one line of 80 columns."""
    statuses = ", ".join(f"{count} x {status}" for status, count in row["statuses"].items())
    if "fault" in row:
        return f"{row['fault']:<14} {row['requests']:>6} requests: {statuses}, {row['lost']} lost"
    times = " ".join(
        f"{name[:3]} {1000 * row[name]:.3g} ms" for name in ("p50_seconds", "p99_seconds") if name in row
    )
    clients = f"{row['clients']:>4} client" + ("s" if row["clients"] > 1 else " ")
    return f"{row['mode']:<14} {clients} {row['requests_per_second']:>8,.0f}/s  {times}"


def _overload(server: Server, clients: int, seconds: float) -> tuple[Load, dict[str, Any]]:
    where = server.url, server.path, server.body
    calm = asyncio.run(closed_loop(*where, clients=clients, seconds=seconds)).record()
    rate = RATE * calm["requests_per_second"]
    load = asyncio.run(open_loop(*where, rate=rate, seconds=seconds))
    after = asyncio.run(closed_loop(*where, clients=1, seconds=0.5))
    more = {"offered_per_second": round(load.requests / seconds, 1), "capacity": calm["requests_per_second"]}
    return load, more | {"statuses_after": dict(after.statuses)}


def _kill(server: Server, clients: int, seconds: float) -> tuple[Load, dict[str, Any]]:
    """Kill the process of the model with requests in flight; measure the time until it answers again."""

    async def both() -> tuple[Load, float]:
        where, stop = (server.url, server.path, server.body), asyncio.Event()
        before = await get_json(server.url, "/healthz")
        load = asyncio.create_task(closed_loop(*where, clients=clients, seconds=LONGEST, stop=stop))
        await asyncio.sleep(seconds / 2)
        os.kill(before["process"], getattr(signal, "SIGKILL", signal.SIGTERM))
        began = time.perf_counter()
        while True:
            about = await get_json(server.url, "/healthz")
            if about["restarts"] == 1 and about["status"] == "ready":
                break
            await asyncio.sleep(0.05)
        down = time.perf_counter() - began
        await asyncio.sleep(seconds / 2)
        stop.set()
        return await load, down

    load, down = asyncio.run(both())
    return load, {"restart_seconds": round(down, 2)}


def _hang_up(server: Server, clients: int, seconds: float) -> tuple[Load, dict[str, Any]]:
    """Let clients hang up all the time beside others that wait for their answers."""

    async def both() -> tuple[Load, int, float]:
        where, gone = (server.url, server.path, server.body), 0
        patient = asyncio.create_task(closed_loop(*where, clients=max(1, clients // 4), seconds=seconds))
        while not patient.done():
            await hang_up(*where, clients=clients // 4)
            gone += clients // 4
            await asyncio.sleep(0.1)
        began = time.perf_counter()
        while (await get_json(server.url, "/healthz"))["waiting"]:
            await asyncio.sleep(0.02)
        return await patient, gone, time.perf_counter() - began

    load, gone, empty = asyncio.run(both())
    return load, {"hung_up": gone, "empty_after_seconds": round(empty, 3)}


def _terminate(server: Server, clients: int, seconds: float) -> tuple[Load, dict[str, Any]]:
    """Send SIGTERM with one request of each client in flight: all of them are answered."""

    async def both() -> Load:
        load, connections = Load(), [Connection(server.url) for _ in range(clients)]
        for connection in connections:  # connected before the signal
            await connection.ask("GET", "/healthz")
        began = time.perf_counter()
        asks = [
            connection.ask("POST", server.path, server.body(i)) for i, connection in enumerate(connections)
        ]
        answers = asyncio.gather(*asks, return_exceptions=True)
        await asyncio.sleep(0.01)
        server.process.terminate()
        for answer in await answers:
            if isinstance(answer, BaseException):
                load.lost += 1
            else:
                load.statuses[answer[0]] += 1
        load.seconds = time.perf_counter() - began
        return load

    load = asyncio.run(both())
    server.process.wait(30)
    return load, {}


_FAULTS = dict(zip(FAULTS, (_overload, _kill, _hang_up, _terminate), strict=True))
