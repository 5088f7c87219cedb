"""Messages between the processes: objects and arrays come out as they went in; a lost side is noticed."""

import asyncio
import socket

import numpy as np
import pytest

from driftgen.serve.channel import LENGTHS, BlockingChannel, receive, send

ARRAYS = {
    "images": np.arange(24, dtype=np.uint8).reshape(2, 3, 4)[:, ::2],  # not contiguous
    "state": np.linspace(0, 1, 5, dtype=np.float32),
    "none": np.zeros((0, 3)),
    "number": np.array(7, np.int64),
}


def same(got, want):
    return got.keys() == want.keys() and all(
        got[key].dtype == want[key].dtype and np.array_equal(got[key], want[key]) for key in want
    )


def test_there_and_back():
    async def main():
        ours, theirs = socket.socketpair()
        other = BlockingChannel(theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        send(writer, [({"do": "add", "text": "é"}, ARRAYS), ({"do": "drop"}, None)])
        about, arrays = await asyncio.to_thread(other.receive)
        assert about == {"do": "add", "text": "é"}
        assert same(arrays, ARRAYS)
        assert await asyncio.to_thread(other.receive) == ({"do": "drop"}, {})
        large = {"rows": np.arange(3_000_000)}
        sending = asyncio.to_thread(other.send, {"batch": 1}, large)
        (about, arrays), _ = await asyncio.gather(receive(reader), sending)
        assert about == {"batch": 1}
        assert same(arrays, large)
        writer.close()
        await writer.wait_closed()
        assert await asyncio.to_thread(other.receive) is None
        other.close()

    asyncio.run(main())


@pytest.mark.parametrize("length", [0, 5, 11, 20])
def test_a_side_that_goes_in_the_middle_of_a_message(length):
    ours, theirs = socket.socketpair()
    message = LENGTHS.pack(50, 100) + b"x" * 50
    ours.sendall(message[:length])
    ours.close()
    assert BlockingChannel(theirs).receive() is None

    async def main():
        first, second = socket.socketpair()
        first.sendall(message[:length])
        first.close()
        reader, writer = await asyncio.open_connection(sock=second)
        with pytest.raises(EOFError):
            await receive(reader)
        writer.close()

    asyncio.run(main())
