"""Everything behind the page: services with their processes, views, and the training that was started.

Views import torch on first use, not at the start: the process that samples imports it at the same time as
this one imports gradio.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from driftgen.errors import InputError
from driftgen.studio.app.downloads import Downloads
from driftgen.studio.app.tab_html import show_message
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.studio.service import Service
from driftgen.studio.worker_process import WorkerProcess

if TYPE_CHECKING:
    from driftgen.studio.run_view import RunView
    from driftgen.studio.training_job import TrainingJob

__all__ = ["Workshop", "say_errors", "whole"]


class Workshop:
    """The parts of a studio.

    Args:
        folders: that may be read.
        device: of models; the best one if None.
    """

    def __init__(self, folders: ReadableFolders, device: str | None = None) -> None:
        self.folders, self.device = folders, device
        self.downloads = Downloads()
        self._lock = threading.Lock()
        self._processes: dict[str, tuple[WorkerProcess, Service]] = {}

    async def sample(self, name: str, argument: Any) -> Any:
        """Ask the process that samples."""
        return await asyncio.wrap_future(self._ask("sampler", "Sampler", name, argument))

    async def roll_out(self, name: str, argument: Any) -> Any:
        """Ask the process that simulates policies, which is started by the first question."""
        return await asyncio.wrap_future(self._ask("policy_rollouts", "PolicyRollouts", name, argument))

    def warm_up(self) -> None:
        """Start the process that samples."""
        self._ask("sampler", "Sampler", "list_models", None)

    def import_views(self) -> None:
        """Import what the other tabs need, in the background, once the page is there."""
        threading.Thread(target=lambda: (self.runs, self.job), daemon=True).start()

    @cached_property
    def runs(self) -> RunView:
        """Reads runs."""
        from driftgen.studio.run_view import RunView

        return RunView(self.folders)

    @cached_property
    def job(self) -> TrainingJob:
        """The training that was started from the page."""
        from driftgen.studio.training_job import TrainingJob

        return TrainingJob(self.folders)

    def close(self) -> None:
        """End the processes, but not a training."""
        for process, _ in self._processes.values():
            process.close()

    def _ask(self, module: str, cls: str, name: str, argument: Any) -> Future[Any]:
        with self._lock:
            if module not in self._processes:
                process = WorkerProcess(f"driftgen.studio.{module}", cls, self.folders, self.device)
                self._processes[module] = process, Service(process.call)
            return self._processes[module][1].submit(name, argument)


def say_errors(error: BaseException) -> str:
    """Return the sentence of wrong input as HTML; raise anything else."""
    if isinstance(error, InputError):
        return show_message(str(error), error=True)
    if isinstance(error, OSError):
        return show_message(f"{error.strerror or error}: {error.filename or 'a file'}", error=True)
    raise error


def whole(name: str, value: object, low: int, high: int) -> int:
    """Return a number of the page as an integer of a range."""
    try:
        number = int(str(value).removesuffix(".0"))
    except ValueError:
        raise InputError(f"{name} is {value!r}: give an integer") from None
    if not low <= number <= high:
        raise InputError(f"{name} is {number}: give an integer from {low} to {high}")
    return number
