"""One worker that answers requests in the order of arrival, with a bounded queue before it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from driftgen.errors import InputError

__all__ = ["Service"]

MOST_WAITING = 100


class _Job(NamedTuple):
    future: Future[Any]
    name: str
    argument: Any


class Service:
    """Calls a function for one request after the other, in a thread.

    Requests hold their arguments only: memory is that of one call, however many wait.

    Args:
        call: gets the name and the argument of a request, and returns the answer.
        most_waiting: requests that wait at most; further ones are refused.
    """

    def __init__(self, call: Callable[[str, Any], Any], most_waiting: int = MOST_WAITING) -> None:
        self._call = call
        self._jobs: queue.Queue[_Job | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, name: str, argument: Any) -> Future[Any]:
        """Append a request and return its future answer; raise if too many wait."""
        job = _Job(Future(), name, argument)
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise InputError(
                f"{self._jobs.maxsize} requests are waiting already: try again in a moment"
            ) from None
        return job.future

    def close(self) -> None:
        """Finish the requests that wait, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                answer = self._call(job.name, job.argument)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(answer)
            del job  # with its answer, before the wait for the next one
