"""A process that does the work of a page: it imports torch beside the server, and may die without it."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import traceback
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from driftgen.errors import InputError

__all__ = ["WorkerProcess"]

SECONDS_TO_END = 5.0
SECONDS_TO_ANSWER = 1.0  # for a call that is running when the process is to end
# In messages of torch's allocators.
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


class WorkerProcess:
    """An object in a process of its own. A process that dies is replaced.

    Args:
        module: the module of the object's class.
        cls: the name of the class.
        arguments: of the class.
    """

    def __init__(self, module: str, cls: str, *arguments: Any) -> None:
        self._target = (module, cls, arguments)
        self._lock = threading.Lock()
        self._closed = False
        self._start()

    @property
    def pid(self) -> int | None:
        """Id of the process."""
        return self._process.pid

    def call(self, name: str, argument: Any) -> Any:
        """Call a method of the object and return its answer. Wrong input raises InputError."""
        with self._lock:
            try:
                self._connection.send((name, argument))
                kind, answer = self._connection.recv()
            except (EOFError, OSError):
                code = self._end()
                if self._closed:
                    raise InputError("the server ended before this was done") from None
                self._start()
                raise InputError(
                    f"the process that works on this ended (exit code {code}), often for lack of memory: it "
                    "has been started again; ask for less"
                ) from None
        if kind == "answer":
            return answer
        raise InputError(answer)

    def close(self) -> None:
        """End the process, whatever it computes."""
        self._closed = True
        if not self._lock.acquire(timeout=SECONDS_TO_ANSWER):
            self._process.kill()  # which ends the call
            self._lock.acquire()
        self._end()
        self._lock.release()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._target), daemon=True)
        self._process.start()
        theirs.close()

    def _end(self) -> int | None:
        self._connection.close()
        self._process.join(SECONDS_TO_END)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        return self._process.exitcode


def _serve(connection: Connection, module: str, cls: str, arguments: tuple[Any, ...]) -> None:
    """Answer calls until the other side closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the server, which closes the connection
    served, refusal = None, ""
    try:
        served = getattr(import_module(module), cls)(*arguments)
    except InputError as error:  # every call raises it
        refusal = str(error)
    while True:
        try:
            name, argument = connection.recv()
        except EOFError:
            return
        try:
            if refusal:
                raise InputError(refusal)
            answer = ("answer", getattr(served, name)(argument))
        except InputError as error:
            answer = ("error", str(error))
        except Exception as error:  # of any model or simulator: the server continues
            answer = ("error", _describe(error))
        connection.send(answer)


def _describe(error: Exception) -> str:
    """Return one line about an error that nobody foresaw, and print where it comes from."""
    first = next(iter(str(error).splitlines()), "")[:200]
    if isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY):
        return f"out of memory ({first or 'MemoryError'}): ask for fewer images"
    traceback.print_exception(error)
    return f"this failed ({type(error).__name__}: {first}); the terminal of the studio shows more"
