"""Processes that run the trainings of a study, each with its own threads; a GPU is shared by all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from driftgen.errors import InputError, NotFiniteError
from driftgen.support.distributed import Distributed
from driftgen.training.config import PretrainConfig, TrainConfig
from driftgen.training.pretrain import pretrain
from driftgen.training.trainer import train

__all__ = ["Job", "Outcome", "Progress", "Workers", "run_job"]

SAVE_SECONDS = 60.0  # a worker has this long to save after a signal


@dataclass(frozen=True)
class Job:
    """One training: a generator or an encoder."""

    key: str
    folder: Path
    config: TrainConfig | PretrainConfig
    name: str
    device: str | None = None


@dataclass(frozen=True)
class Progress:
    """A step of a running job."""

    key: str
    step: int


@dataclass(frozen=True)
class Outcome:
    """End of a job: complete, interrupted, diverged (``failed``) or impossible (``error``)."""

    key: str
    complete: bool
    failed: str | None = None
    error: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass
class _JobView:
    """View that reports steps and collects health warnings."""

    on_step: Callable[[int], None]
    warnings: list[str] = field(default_factory=list)

    def begin(self, summary: object) -> None: ...
    def measured(self, speed: object) -> None: ...
    def advance(self, step: int, seconds_per_step: float | None) -> None: ...

    def update(self, row: Mapping[str, Any]) -> None:
        self.on_step(int(row.get("step", 0)))

    def info(self, text: str) -> None:
        """Show nothing: the study shows its own progress."""

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def run_job(job: Job, on_step: Callable[[int], None] = lambda step: None) -> Outcome:
    """Train in this process, or resume; Ctrl-C and SIGTERM save a checkpoint and end the job early."""
    view = _JobView(on_step)
    try:
        processes = Distributed.start(job.device)
        if isinstance(job.config, TrainConfig):
            complete = train(job.config, job.folder, processes, view, name=job.name)
        else:
            complete = pretrain(job.config, job.folder, processes, view, name=job.name)
    except NotFiniteError as error:
        return Outcome(job.key, True, failed=str(error), warnings=tuple(view.warnings))
    except InputError as error:
        return Outcome(job.key, False, error=str(error))
    return Outcome(job.key, complete, warnings=tuple(view.warnings))


def _serve(pipe: Connection, threads: int) -> None:
    """Run jobs from the pipe until it closes."""
    # A process group of its own: the main process alone receives Ctrl-C, and passes it on once.
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the main process has ended
        while True:
            job: Job = pipe.recv()

            def report(step: int, key: str = job.key) -> None:
                pipe.send(Progress(key, step))

            pipe.send(run_job(job, report))


class Workers:
    """Worker processes; leaving the ``with`` block stops them, and running jobs save a checkpoint.

    Args:
        count: number of processes. One runs jobs in the calling process.
        threads: CPU threads of each worker process.
    """

    def __init__(self, count: int, threads: int = 1) -> None:
        self.count, self.threads = count, threads
        self._processes: dict[Connection, Any] = {}
        self._busy: dict[Connection, str] = {}
        self._waiting: Job | None = None  # with one process: the job that events() runs

    def __enter__(self) -> Workers:
        if self.count > 1:
            for _ in range(self.count):
                self._start_process()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in self._processes.items():
            if pipe in self._busy and process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + SAVE_SECONDS
        for pipe, process in self._processes.items():
            while pipe in self._busy and time.monotonic() < deadline:
                if not pipe.poll(0.1):
                    if not process.is_alive():
                        break
                    continue
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    break
                if isinstance(message, Outcome):
                    break
            pipe.close()
        for process in self._processes.values():
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()

    def _start_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self.threads), daemon=False)
        process.start()
        theirs.close()
        self._processes[ours] = process

    @property
    def idle(self) -> int:
        """Number of jobs that can start now."""
        if self.count == 1:
            return int(self._waiting is None)
        return len(self._processes) - len(self._busy)

    def start(self, job: Job) -> None:
        """Give a job to an idle worker."""
        if self.count == 1:
            self._waiting = job
            return
        pipe = next(p for p in self._processes if p not in self._busy)
        pipe.send(job)
        self._busy[pipe] = job.key

    def _replace(self, pipe: Connection) -> Outcome:
        """Start a process in place of one that has ended, and return the outcome of its job."""
        self._processes.pop(pipe).join()
        self._start_process()
        return Outcome(
            self._busy[pipe],
            False,
            error="its process ended without a result: use fewer --processes if memory ran out",
        )

    def events(self, on_step: Callable[[Progress], None]) -> Iterator[Outcome]:
        """Wait until at least one job ends and yield outcomes; ``on_step`` receives the steps before."""
        if self.count == 1:
            job, self._waiting = self._waiting, None
            if job is not None:
                key = job.key
                yield run_job(job, lambda step: on_step(Progress(key, step)))
            return
        ended: list[Outcome] = []
        while self._busy and not ended:
            for ready in wait(list(self._busy)):
                assert isinstance(ready, Connection)
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    message = self._replace(ready)
                if isinstance(message, Progress):
                    on_step(message)
                else:
                    del self._busy[ready]
                    ended.append(message)
        yield from ended
