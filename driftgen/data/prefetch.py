"""Load the samples of the next draw in a background thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

__all__ = ["PartPredictor", "Prefetcher"]

T = TypeVar("T")
Key = tuple[int, ...]


class Prefetcher(Generic[T]):
    """Runs the next load in a background thread.

    A key identifies a load and determines its result, so prefetching never changes a result.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="driftgen-ahead")
        self._pending: tuple[Key, Future[T]] | None = None

    def get(self, key: Key, load: Callable[[], T]) -> T:
        """Return the prefetched result for ``key``, or call ``load`` now."""
        pending, self._pending = self._pending, None
        if pending is None:
            return load()
        if pending[0] == key:
            return pending[1].result()
        if not pending[1].cancel():
            wait([pending[1]])  # loads must not run concurrently
        return load()

    def wait(self) -> None:
        """Wait until no load runs in the background. A finished result stays available."""
        if self._pending is not None:
            wait([self._pending[1]])

    def start(self, key: Key, load: Callable[[], T]) -> None:
        """Start the load that is likely to be requested next."""
        self._pending = key, self._thread.submit(load)


class PartPredictor:
    """Predicts the next part to be drawn: every step is drawn in the same parts, in the same order."""

    def __init__(self, whole: Key) -> None:
        self._step = -1
        self._current: list[Key] = []
        self._previous: list[Key] = [whole]

    def after(self, step: int, part: Key) -> tuple[int, Key] | None:
        """Return the step and part expected after these, or None if they cannot be predicted yet."""
        if step != self._step:
            self._step, self._previous, self._current = step, self._current or self._previous, []
        self._current.append(part)
        n = len(self._current)
        if self._current != self._previous[:n]:
            return None
        return (step, self._previous[n]) if n < len(self._previous) else (step + 1, self._previous[0])
