"""The process of the model: loads it, reads requests and answers with batches.

One thread reads messages and draws the noise of new requests while the other one computes a batch.
"""

from __future__ import annotations

import queue
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

from driftgen.errors import InputError
from driftgen.serve.channel import BlockingChannel
from driftgen.serve.served_model import ModelOptions, ServedImages, ServedPolicy, load_served

__all__ = ["answer_requests", "run_model"]

FATAL = ("CUDA error", "device-side assert", "CUBLAS_STATUS", "an illegal memory access")


def run_model(connection: socket.socket, options: Mapping[str, Any]) -> None:
    """Load a model and answer requests until the other side has gone: the whole life of the process.

    Ctrl-C and SIGTERM, which reach all processes of a group, are left to the other process: it finishes what
    it accepted, then closes the connection.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = BlockingChannel(connection)
    try:
        answer_requests(channel, ModelOptions(**options))
    except OSError:
        sys.exit(0)  # the other side has gone


def answer_requests(channel: BlockingChannel, options: ModelOptions) -> None:
    """Load a model, describe it, and answer requests until the other side has gone.

    An InputError while loading is sent as a message ``{"error": ...}``.
    """
    try:
        model = load_served(options)
    except InputError as error:
        channel.send({"error": str(error)})
        return
    except OSError as error:
        channel.send(
            {"error": f"{error.strerror or error}: {error.filename}" if error.filename else str(error)}
        )
        return
    except (RuntimeError, MemoryError) as error:
        channel.send({"error": f"the model cannot be loaded: {_first_line(error)}"})
        return
    channel.send({"ready": model.describe()})
    batches: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    failures: dict[int, str] = {}
    reader = threading.Thread(target=_read, args=(channel, model, batches, failures), daemon=True)
    reader.start()
    while (batch := batches.get()) is not None:
        _answer(channel, model, batch, failures)


def _read(
    channel: BlockingChannel,
    model: ServedImages | ServedPolicy,
    batches: queue.SimpleQueue[dict[str, Any] | None],
    failures: dict[int, str],
) -> None:
    while (message := channel.receive()) is not None:
        about, arrays = message
        if about["do"] == "add":
            try:
                model.add(about["ticket"], about["request"], arrays)
            except Exception as error:  # reported with its batch
                failures[about["ticket"]] = _first_line(error)
        elif about["do"] == "drop":
            model.drop(about["ticket"])
            failures.pop(about["ticket"], None)
        else:
            batches.put(about)
    batches.put(None)


def _answer(
    channel: BlockingChannel,
    model: ServedImages | ServedPolicy,
    batch: Mapping[str, Any],
    failures: dict[int, str],
) -> None:
    failed = [failures.pop(ticket) for ticket, _, _ in batch["parts"] if ticket in failures]
    try:
        if failed:
            raise InputError(failed[0])
        rows = model.run([(ticket, start, stop) for ticket, start, stop in batch["parts"]])
    except Exception as error:
        for ticket, _, _ in batch["parts"]:
            model.drop(ticket)
        why = _first_line(error)
        channel.send({"batch": batch["batch"], "failed": f"{type(error).__name__}: {why}"})
        if any(text in str(error) for text in FATAL):
            sys.exit(1)  # the GPU is no longer usable from this process
    else:
        channel.send({"batch": batch["batch"]}, {"rows": rows})


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:300]
