"""The load generator counts every request: answered with a status, or lost."""

import asyncio

from driftgen.bench.http_load import closed_loop, get_json, hang_up, open_loop
from driftgen.bench.serve_bench import show_row


async def answering(scenario):
    """Run a scenario with a server whose answers to requests 0, 1, 2, ... are 200, 429, none, 200, ..."""
    seen = []

    async def handle(reader, writer):
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split()[0])
                await reader.readexactly(length)
                seen.append(head.split()[1])
                kind = (len(seen) - 1) % 3
                if kind == 2:
                    break
                more = "Retry-After: 1\r\n" if kind else ""
                writer.write(
                    f"HTTP/1.1 {429 if kind else 200} x\r\nContent-Length: 2\r\n{more}\r\n{{}}".encode()
                )
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        return await scenario(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen)


def test_every_request_is_counted():
    async def scenario(url, seen):
        load = await open_loop(url, "/x", lambda i: {"i": i}, rate=300, seconds=0.3)
        assert load.requests == len(seen) > 20
        third = load.requests // 3
        assert abs(load.statuses[200] - third) <= 1
        assert abs(load.statuses[429] - third) <= 1
        assert abs(load.lost - third) <= 1
        assert load.retry_after == load.statuses[429]
        assert len(load.latencies) == load.statuses[200]
        record = load.record()
        assert record["p50_seconds"] <= record["p99_seconds"] <= record["max_seconds"]
        row = {"fault": "none"} | record
        assert show_row(row).endswith(f"{load.lost} lost")
        assert " 1 client  " in show_row({"mode": "batched", "clients": 1} | record)
        assert " 16 clients " in show_row({"mode": "batched", "clients": 16} | record)

    asyncio.run(answering(scenario))


def test_a_client_sends_when_it_is_answered():
    async def scenario(url, seen):
        load = await closed_loop(url, "/x", lambda i: {}, clients=3, seconds=0.1)
        assert load.requests == len(seen)
        assert load.statuses[200] >= 1
        before = len(seen)
        await hang_up(url, "/gone", lambda i: {}, clients=4)
        assert seen[before:] == ["/gone"] * 4
        while len(seen) % 3:
            await closed_loop(url, "/x", lambda i: {}, clients=1, seconds=0.01)
        assert await get_json(url, "/y") == {}

    asyncio.run(answering(scenario))
