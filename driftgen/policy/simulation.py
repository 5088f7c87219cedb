"""Many episodes at once: environments spread over processes, each advanced by a chunk of actions."""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.policy.environments import find_task, make_environment
from driftgen.support.whole_numbers import check_count

__all__ = ["MOST_EPISODES", "Simulation", "Status", "check_episode_seeds", "choose_processes"]

MOST_EPISODES, MOST_STEPS, MOST_PROCESSES = 100_000, 1_000_000, 1024
SEEDS = 2**32  # of the simulators: NumPy's older generator takes 32 bits

Array = NDArray[Any]


class Status(NamedTuple):
    """State of an episode after a chunk.

    Attributes:
        history: the last observations by key, ``[observed, ...]``; the oldest first.
        scores: score of each step of the chunk that was executed.
        success: True if the episode succeeded, which ends it.
        done: True if the episode succeeded or reached its last step.
    """

    history: dict[str, Array]
    scores: list[float]
    success: bool
    done: bool


class _Episode:
    """One environment with the observation history of its current episode."""

    def __init__(self, task: str, preset: str, observed: int, max_steps: int) -> None:
        self.environment = make_environment(task, preset)
        self.max_steps = max_steps
        self.history: deque[dict[str, Array]] = deque(maxlen=observed)
        self.steps, self.success = 0, False

    def reset(self, seed: int) -> Status:
        observation, _ = self.environment.reset(seed=seed)
        self.steps, self.success = 0, False
        # The first observation stands for the missing history, as in the windows of training.
        self.history.extend([observation] * (self.history.maxlen or 1))
        return self.status([])

    def advance(self, actions: Array) -> Status:
        scores = []
        for action in actions:
            if self.success or self.steps >= self.max_steps:
                break
            observation, _, _, _, info = self.environment.step(action)
            self.history.append(observation)
            self.steps += 1
            self.success = bool(info["success"])
            scores.append(float(info["score"]))
        return self.status(scores)

    def status(self, scores: list[float]) -> Status:
        history = {key: np.stack([past[key] for past in self.history]) for key in self.history[0]}
        return Status(history, scores, self.success, self.success or self.steps >= self.max_steps)


class _Group:
    """Environments of one process; each is built when its first episode starts."""

    def __init__(self, task: str, preset: str, observed: int, max_steps: int) -> None:
        self.options = (task, preset, observed, max_steps)
        self.episodes: dict[int, _Episode] = {}

    def reset(self, seeds: dict[int, int]) -> dict[int, Status]:
        for slot in seeds:
            if slot not in self.episodes:
                self.episodes[slot] = _Episode(*self.options)
        return {slot: self.episodes[slot].reset(seed) for slot, seed in seeds.items()}

    def advance(self, chunks: dict[int, Array]) -> dict[int, Status]:
        return {slot: self.episodes[slot].advance(chunk) for slot, chunk in chunks.items()}

    def close(self) -> None:
        for episode in self.episodes.values():
            episode.environment.close()
        self.episodes.clear()
        gc.collect()  # environments of robosuite are circles of 50 MB each


def _serve(connection: Connection, parent: Connection, options: tuple[str, str, int, int]) -> None:
    """Answer calls from the main process until it closes its end."""
    parent.close()  # inherited; the pipe would stay open after the main process is killed
    group = _Group(*options)
    while True:
        try:
            name, argument = connection.recv()
        except (EOFError, KeyboardInterrupt):
            break
        try:
            answer: Any = getattr(group, name)(argument)
        except KeyboardInterrupt:
            break
        except InputError as error:
            answer = error
        except Exception:  # of any simulator; the main process raises it with this traceback
            answer = RuntimeError(f"an environment failed:\n{traceback.format_exc()}")
        try:
            connection.send(answer)
        except (OSError, KeyboardInterrupt):  # the main process was killed meanwhile
            break
    group.close()


class Simulation:
    """Episodes of one task that advance together, in this process or in several others.

    Results do not depend on the number of processes.

    Example::

        with Simulation("pusht", "keypoints") as simulation:
            statuses = simulation.reset([100_000, 100_001])
            statuses = simulation.advance({0: chunk, 1: chunk})

    Args:
        task: name of the task.
        preset: of the observations.
        observed: length of the observation history.
        max_steps: steps of an episode; those of the task if None.
        processes: 1 simulates in this process.
    """

    def __init__(
        self, task: str, preset: str, *, observed: int = 2, max_steps: int | None = None, processes: int = 1
    ) -> None:
        limit = find_task(task).max_steps if max_steps is None else max_steps
        check_count("max_steps", limit, most=MOST_STEPS)
        options = (task, preset, observed, limit)
        self._group: _Group | None = _Group(*options) if processes <= 1 else None
        self._workers: list[tuple[Any, Connection]] = []
        # Not fork: a copy of a process with threads and a CUDA context hangs or crashes.
        context = multiprocessing.get_context("spawn")
        for _ in range(processes if processes > 1 else 0):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs, ours, options), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append((worker, ours))

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def reset(self, seeds: Sequence[int]) -> dict[int, Status]:
        """Start an episode of each seed; returns the status by position."""
        return self._call("reset", dict(enumerate(seeds)))

    def advance(self, chunks: dict[int, Array]) -> dict[int, Status]:
        """Execute a chunk ``[steps, A]`` in each of these episodes."""
        return self._call("advance", chunks)

    def close(self) -> None:
        """Stop the processes and close the environments."""
        if self._group is not None:
            self._group.close()
        for worker, connection in self._workers:
            connection.close()
            worker.join(timeout=5)
            if worker.is_alive():
                worker.terminate()
        self._workers = []

    def _call(self, name: str, arguments: dict[int, Any]) -> dict[int, Status]:
        if self._group is not None:
            answer: dict[int, Status] = getattr(self._group, name)(arguments)
            return answer
        count = len(self._workers)
        busy = []
        for index, (worker, connection) in enumerate(self._workers):
            part = {slot: value for slot, value in arguments.items() if slot % count == index}
            if part:
                try:
                    connection.send((name, part))
                except OSError:
                    raise _died(worker) from None
                busy.append((worker, connection))
        statuses: dict[int, Status] = {}
        failure: Exception | None = None
        for worker, connection in busy:
            try:
                found = connection.recv()
            except (EOFError, OSError):
                raise _died(worker) from None
            if isinstance(found, Exception):
                failure = failure or found
            else:
                statuses |= found
        if failure is not None:
            raise failure
        return statuses


def _died(worker: Any) -> InputError:
    worker.join(timeout=1)
    return InputError(
        f"a simulator process ended with exit code {worker.exitcode}: out of memory? use fewer --processes"
    )


def check_episode_seeds(argument: str, first: Any, episodes: int = 1) -> None:
    """Raise ``InputError`` unless the simulators take ``episodes`` seeds that count up from ``first``."""
    check_count(argument, first, 0, SEEDS - episodes)


def choose_processes(processes: int | None, episodes: int) -> int:
    """Return a number of processes; by default one per CPU core, at most one per episode."""
    if processes is not None:
        check_count("processes", processes, most=MOST_PROCESSES)
        return processes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, episodes))
