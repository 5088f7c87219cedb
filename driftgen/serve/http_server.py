"""Run a server: listen, load the model, answer until Ctrl-C or SIGTERM, finish what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from driftgen.errors import InputError
from driftgen.serve.batcher import Batcher, UnavailableError
from driftgen.serve.model_process import LOST, ModelProcess, Process, spawn
from driftgen.serve.served_model import ModelOptions
from driftgen.serve.web_app import Limits, make_app
from driftgen.support.signals import handle_signals

__all__ = ["ServeOptions", "open_service", "run_server"]

KEEP_ALIVE = 30  # seconds that an idle connection stays open
DRAIN_SECONDS = 0.5
BACKLOG = 512  # connections that wait, and that are accepted at a time: others are answered in between


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server.

    Attributes:
        model: the model and how it is computed.
        limits: of requests.
        host: address to listen on.
        port: 0 for a free one.
        window: seconds that a request may wait for others.
        queue: images or action chunks that may wait.
        timeout: seconds of a batch after which the model counts as stuck.
    """

    model: ModelOptions
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    port: int = 8000
    window: float = 0.004
    queue: int = 512
    timeout: float = 120.0

    def check(self) -> None:
        """Raise InputError for values that do not work together."""
        for name, value, least, most in (
            ("batch-size", self.model.batch_size, 1, 2**16),
            ("queue", self.queue, 1, 2**24),
            ("max-images", self.limits.images, 1, self.queue),
            ("max-body", self.limits.body, 1, 2**31),
            ("port", self.port, 0, 65535),
            ("window", 1000 * self.window, 0, 1000),
            ("timeout", self.timeout, 1, 86400),
        ):
            if not least <= value <= most:
                shown = f"{value:g}" if isinstance(value, float) else value
                raise InputError(f"--{name}={shown} must be from {least} to {most}")
        token = self.limits.token
        if token is not None and (
            not token or not token.isascii() or not token.isprintable() or " " in token
        ):
            raise InputError("the token must be visible ASCII characters without spaces")


@contextlib.asynccontextmanager
async def open_service(
    options: ServeOptions, start: Callable[..., Process] = spawn, stopping: asyncio.Event | None = None
) -> Any:
    """Load the model and yield the ASGI application; at the end, finish what was accepted.

    ``stopping`` is set when the end is near, which /healthz then says.
    """
    batcher: Batcher | None = None

    def lose() -> None:
        if batcher is not None:
            batcher.fail_all(UnavailableError(LOST, 2))

    model = ModelProcess(options.model, on_lost=lose, timeout=options.timeout, start=start)
    try:
        await model.start()
        largest = options.model.batch_size
        batcher = Batcher(model, largest=largest, window=options.window, most_waiting=options.queue)
        yield make_app(batcher, model, options.limits, stopping or asyncio.Event())
        await batcher.close()
    finally:
        await model.close()


def run_server(options: ServeOptions, announce: Callable[[str], None] = print) -> None:
    """Serve until Ctrl-C or SIGTERM. ``announce`` is told the address once requests are answered."""
    options.check()
    listener = _listen(options.host, options.port)
    try:
        asyncio.run(_serve(options, listener, announce))
    finally:
        listener.close()


async def _serve(options: ServeOptions, listener: socket.socket, announce: Callable[[str], None]) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """Leaves signals to the caller: uvicorn would raise them again at the end."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    server: Server | None = None

    def stop(name: str) -> None:
        again = stopping.is_set()
        loop.call_soon_threadsafe(stopping.set)
        if server is not None and again:
            server.force_exit = server.should_exit = True

    async def drain() -> None:
        """Answer what is on its way on open connections, which uvicorn closes at once, then end."""
        await stopping.wait()
        await asyncio.sleep(DRAIN_SECONDS)
        if server is not None:
            server.should_exit = True

    with handle_signals(stop):
        entered = asyncio.create_task(stopping.wait())
        context = open_service(options, stopping=stopping)
        opening = asyncio.ensure_future(context.__aenter__())
        either: set[asyncio.Future[Any]] = {opening, entered}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():  # stopped while the model was loading
            opening.cancel()
            await asyncio.wait({opening})
            return
        entered.cancel()
        app = opening.result()
        draining = asyncio.create_task(drain())
        try:
            config = uvicorn.Config(
                app,
                lifespan="off",
                log_level="warning",
                access_log=False,
                timeout_keep_alive=KEEP_ALIVE,
                backlog=BACKLOG,
            )
            server = Server(config)
            address = _address(options.host, listener)
            announce(f"serving {options.model.model} at {address} (Ctrl-C stops)")
            if not _is_loopback(options.host) and options.limits.token is None:
                print("driftgen: anyone who reaches this machine can use it: give --token", file=sys.stderr)
            await server.serve(sockets=[listener])
        finally:
            draining.cancel()
            await context.__aexit__(None, None, None)


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, before the model is loaded: a port in use is known at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # With the protocol: asyncio turns off Nagle's algorithm (40 ms a request) for such sockets alone.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            if sys.platform != "win32":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "is no address"
        raise InputError(f"cannot listen on {host[:80]!r} port {port}: {why}") from None
    return listener


def _address(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
