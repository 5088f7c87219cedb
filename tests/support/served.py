"""A service inside the test's process: the real loop of the model in a thread, the real application."""

import asyncio
import contextlib
import threading
import time

from driftgen.serve.channel import BlockingChannel
from driftgen.serve.http_server import ServeOptions, open_service
from driftgen.serve.model_loop import answer_requests
from driftgen.serve.served_model import ModelOptions
from driftgen.serve.web_app import Limits


class ModelThread:
    """Runs the loop of the model in a thread instead of a process; a kill closes its connection."""

    pid = 0

    def __init__(self, connection, options):
        self.connection = connection.dup()
        self.channel = BlockingChannel(self.connection)
        self.thread = threading.Thread(target=self.loop, args=(options,), daemon=True)
        self.thread.start()

    def loop(self, options):
        try:
            with contextlib.suppress(OSError):
                answer_requests(self.channel, options)
        finally:
            self.channel.close()

    def join(self, timeout=None):
        self.thread.join(timeout)

    def kill(self):
        with contextlib.suppress(OSError):
            self.connection.shutdown(2)


def serve_here(scenario, model="digits", *, seconds=20, limits=None, **options):
    """Run ``await scenario(client, app)`` with an HTTP client of a service."""
    import httpx

    model_options = {name: options.pop(name) for name in ("batch_size", "exact") if name in options}
    given = ServeOptions(
        ModelOptions(str(model), device="cpu", **{"batch_size": 8} | model_options),
        Limits(**limits or {}),
        **options,
    )

    async def main():
        async with asyncio.timeout(seconds), open_service(given, ModelThread) as app:
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
                return await scenario(client, app)

    return asyncio.run(main())


async def until(condition, seconds=10.0):
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)
