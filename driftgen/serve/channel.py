"""Messages between the two processes of a server: a JSON object and arrays, over a socket.

A message is two lengths, the object, and the bytes of its arrays, whose names, dtypes and shapes the object
holds. Nothing is pickled.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockingChannel", "Message", "receive", "send"]

LENGTHS = struct.Struct(">IQ")
Message = tuple[dict[str, Any], dict[str, NDArray[Any]]]


class BlockingChannel:
    """The side of the model, which reads in one thread and writes in another."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket, self._file = connection, connection.makefile("rb")

    def receive(self) -> Message | None:
        """Return the next message, or None when the other side has gone."""
        try:
            lengths = self._file.read(LENGTHS.size)
            if len(lengths) < LENGTHS.size:
                return None
            header, content = LENGTHS.unpack(lengths)
            text, data = self._file.read(header), self._file.read(content)
        except OSError:
            return None
        return None if len(text) < header or len(data) < content else _decode(text, data)

    def send(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]] | None = None) -> None:
        """Send a message. Raise OSError if the other side has gone."""
        for part in _encode(about, arrays or {}):
            self._socket.sendall(part)

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._socket.close()


async def receive(reader: asyncio.StreamReader) -> Message:
    """Return the next message. Raise IncompleteReadError or OSError when the other side has gone."""
    header, content = LENGTHS.unpack(await reader.readexactly(LENGTHS.size))
    text = await reader.readexactly(header)
    return _decode(text, await reader.readexactly(content) if content else b"")


def send(
    writer: asyncio.StreamWriter,
    messages: Iterable[tuple[Mapping[str, Any], Mapping[str, NDArray[Any]] | None]],
) -> None:
    """Queue messages; what the socket does not take at once waits in memory."""
    writer.writelines([part for about, arrays in messages for part in _encode(about, arrays or {})])


def _encode(about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> list[bytes | memoryview[int]]:
    solid = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    layout = [[name, array.dtype.str, list(array.shape)] for name, array in solid.items()]
    text = json.dumps([dict(about), layout]).encode()
    content = [array.reshape(-1).view(np.uint8).data for array in solid.values() if array.size]
    return [LENGTHS.pack(len(text), sum(map(len, content))) + text, *content]


def _decode(text: bytes, data: bytes) -> Message:
    about, layout = json.loads(text)
    arrays, first = {}, 0
    for name, dtype, shape in layout:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(data, dtype, count, first).reshape(shape)
        first += count * np.dtype(dtype).itemsize
    return about, arrays
