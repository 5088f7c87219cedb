"""The queue of requests: batches, order, bounds, cancellation, failures, the end."""

import asyncio

import numpy as np
import pytest

from driftgen.serve.batcher import Batcher, OverloadedError, UnavailableError


class Slow:
    """A backend that computes 1000 · request + row, and takes as long as it is told."""

    def __init__(self, seconds=0.0):
        self.seconds, self.requests, self.batches, self.dropped = seconds, {}, [], []
        self.gate = None

    def add(self, ticket, request, arrays):
        self.requests[ticket] = request

    def drop(self, ticket):
        self.dropped.append(ticket)

    async def run(self, parts):
        self.batches.append([(self.requests[ticket]["name"], start, stop) for ticket, start, stop in parts])
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(self.seconds)
        names = [(self.requests[ticket]["name"], row) for ticket, a, b in parts for row in range(a, b)]
        if any(name == "bad" for name, _ in names):
            raise UnavailableError("the model is gone")
        return np.array([1000 * name + row for name, row in names])


def run(scenario, seconds=0.0, **options):
    async def main():
        backend = Slow(seconds)
        options_ = {"largest": 4, "window": 0.02, "most_waiting": 100} | options
        batcher = Batcher(backend, **options_)
        async with asyncio.timeout(10):
            await scenario(batcher, backend)
            await batcher.close()
        assert batcher.waiting == batcher.running == 0

    asyncio.run(main())


def submit(batcher, name, rows=1):
    return batcher.submit(rows, {"name": name})


def test_requests_share_batches_and_keep_their_rows():
    async def scenario(batcher, backend):
        backend.gate = asyncio.Event()
        first = submit(batcher, 0)
        await asyncio.sleep(0.01)  # the first one starts at once
        others = [submit(batcher, 1, 3), submit(batcher, 2, 6), submit(batcher, 3)]
        backend.gate.set()
        assert (await first.result).tolist() == [0]
        results = [(await ticket.result).tolist() for ticket in others]
        assert results == [[1000, 1001, 1002], [2000 + i for i in range(6)], [3000]]
        assert backend.batches == [[(0, 0, 1)], [(1, 0, 3), (2, 0, 1)], [(2, 1, 5)], [(2, 5, 6), (3, 0, 1)]]
        assert batcher.sizes == {1: 1, 4: 2, 2: 1}

    run(scenario)


def test_a_single_client_does_not_wait_for_others():
    async def scenario(batcher, backend):
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(5):
            await submit(batcher, 0).result
        assert loop.time() - began < 2.0
        assert len(backend.batches) == 5

    run(scenario, window=5.0)


def test_after_a_large_batch_the_next_one_gathers():
    async def scenario(batcher, backend):
        await submit(batcher, 0, 3).result
        tickets = []
        for name in range(3):  # they come one after the other
            tickets.append(submit(batcher, name))
            await asyncio.sleep(0.01)
        for ticket in tickets:
            await ticket.result
        assert [len(batch) for batch in backend.batches] == [1, 3]
        loop = asyncio.get_running_loop()
        began = loop.time()
        await submit(batcher, 9).result  # no others come: it waits for the window, not longer
        assert 0.2 < loop.time() - began < 5.0
        began = loop.time()
        await submit(batcher, 9).result  # and the next one does not wait
        assert loop.time() - began < 0.2

    run(scenario, window=0.25)


def test_full_batches_follow_each_other_without_a_pause():
    async def scenario(batcher, backend):
        backend.gate = asyncio.Event()
        ticket = submit(batcher, 0, 14)
        await asyncio.sleep(0.01)
        assert len(backend.batches) == batcher.running == 2
        backend.gate.set()
        await ticket.result
        assert [batch[0][1:] for batch in backend.batches] == [(0, 4), (4, 8), (8, 12), (12, 14)]

    run(scenario)


def test_the_queue_is_bounded():
    async def scenario(batcher, backend):
        backend.gate = asyncio.Event()
        tickets = [submit(batcher, 0, 8)]
        await asyncio.sleep(0.01)  # two batches of four are at work
        assert batcher.waiting == 0
        tickets += [submit(batcher, 1, 6), submit(batcher, 2, 4)]
        with pytest.raises(OverloadedError, match="10 images or actions wait"):
            submit(batcher, 3)
        backend.gate.set()
        for ticket in tickets:
            await ticket.result
        await submit(batcher, 3).result  # there is room again

    run(scenario, most_waiting=10)


def test_the_proposed_time_follows_the_speed():
    async def scenario(batcher, backend):
        assert batcher.retry_after() == 1
        await submit(batcher, 0).result
        backend.gate = asyncio.Event()
        tickets = [submit(batcher, 1, 100)]
        assert 4 <= batcher.retry_after() <= 60
        backend.gate.set()
        for ticket in tickets:
            batcher.cancel(ticket)

    run(scenario, seconds=0.05)


def test_a_client_that_hangs_up_frees_its_place():
    async def scenario(batcher, backend):
        backend.gate = asyncio.Event()
        running = submit(batcher, 0, 4)
        await asyncio.sleep(0.01)
        gone, kept = submit(batcher, 1, 3), submit(batcher, 2, 3)
        split = submit(batcher, 3, 3)
        batcher.cancel(gone)
        batcher.cancel(gone)
        batcher.cancel(running)  # its batch ends, nobody wants it
        assert batcher.waiting == 6
        assert backend.dropped == [gone.number, running.number]
        backend.gate.set()
        assert (await kept.result).tolist() == [2000, 2001, 2002]
        assert (await split.result).tolist() == [3000, 3001, 3002]
        assert all(name != 1 for batch in backend.batches for name, _, _ in batch)
        batcher.cancel(kept)  # done: nothing happens
        assert backend.dropped == [gone.number, running.number]

    run(scenario)


def test_a_failed_batch_fails_its_requests_alone():
    async def scenario(batcher, backend):
        bad, split = submit(batcher, "bad", 2), submit(batcher, 1, 9)
        with pytest.raises(UnavailableError, match="the model is gone"):
            await bad.result
        with pytest.raises(UnavailableError):
            await split.result
        assert batcher.waiting == 0
        assert (await submit(batcher, 2).result).tolist() == [2000]

    run(scenario)


def test_all_that_wait_fail_with_a_lost_model():
    async def scenario(batcher, backend):
        backend.gate = asyncio.Event()
        running = submit(batcher, 0, 2)
        await asyncio.sleep(0.01)
        waiting = [submit(batcher, 1), submit(batcher, 2)]
        batcher.fail_all(UnavailableError("lost"))
        for ticket in waiting:
            with pytest.raises(UnavailableError, match="lost"):
                await ticket.result
        backend.gate.set()
        await running.result

    run(scenario)


def test_the_end_finishes_what_was_accepted():
    async def scenario(batcher, backend):
        backend.gate = asyncio.Event()
        tickets = [submit(batcher, name, 3) for name in range(5)]
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0.01)
        with pytest.raises(UnavailableError, match="shutting down"):
            submit(batcher, 9)
        assert not closing.done()
        backend.gate.set()
        await closing
        assert [ticket.result.result().tolist()[0] for ticket in tickets] == [0, 1000, 2000, 3000, 4000]

    run(scenario, window=60.0)


def test_one_at_a_time():
    async def scenario(batcher, backend):
        tickets = [submit(batcher, name, 2) for name in range(3)]
        for ticket in tickets:
            await ticket.result
        assert all(stop - start == 1 for batch in backend.batches for _, start, stop in batch)
        assert {len(batch) for batch in backend.batches} == {1}

    run(scenario, largest=1, window=0.0)
