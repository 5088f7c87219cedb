"""The Runs tab: runs on disk as HTML, read again while they go on."""

from __future__ import annotations

import os
from pathlib import Path

from driftgen.errors import InputError
from driftgen.report.live_run import show_comparison, show_run
from driftgen.report.run_files import RunFiles, read_run
from driftgen.studio.model_list import list_runs
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.support.folder_lock import check_not_held
from driftgen.training.run_folder import CONFIG, METRICS, SAMPLES

__all__ = ["RunView"]

# What a page of a run is made of.
FILES = (CONFIG, METRICS, "evaluation.json", SAMPLES)
COMMANDS = {"train": "train", "pretrain": "pretrain", "policy": "policy train"}


class RunView:
    """Reads runs for a page.

    Args:
        folders: that may be read.
    """

    def __init__(self, folders: ReadableFolders) -> None:
        self.folders = folders

    def names(self) -> list[str]:
        """Return the runs, the newest first; folders that hold a model alone are none."""
        runs = self.folders.runs
        return [name for name in list_runs(self.folders) if _is_run(runs / name)]

    def version(self, *names: str) -> str:
        """Return a text that changes whenever the page of these runs would."""
        parts = []
        for name in names:
            folder = self.folders.runs / name
            stamps = [_stamp(folder / file) for file in FILES]
            parts.append(f"{name} {stamps} {_holder(folder) is None}")
        return "; ".join(parts)

    def show(self, name: str) -> str:
        """Return the HTML of one run."""
        run = self._read(name)
        holder, complete = _holder(run.folder), run.steps is not None and run.step >= run.steps
        commands = {}
        if holder is not None:
            state = "Training now"
        elif complete:
            state = "Complete"
        else:
            state = "Stopped"
            commands["To resume it, run the same command again:"] = _command(run)
        if complete and not run.is_policy and not run.pretrains:
            commands["To sample images:"] = f"driftgen sample {run.folder} -n 16"
        return show_run(run, f"{state}{_sentence(holder)}", {k: v for k, v in commands.items() if v})

    def compare(self, first: str, second: str) -> str:
        """Return the HTML of two runs side by side."""
        if first == second:
            raise InputError(f"{first} is chosen twice: choose another run to compare it with")
        return show_comparison([self._read(first), self._read(second)])

    def _read(self, name: str) -> RunFiles:
        folder = self.folders.run(name)
        for file in FILES:
            if os.path.lexists(folder / file):
                self.folders.check(folder / file)
        run = read_run(folder)
        if not run.config and not run.rows:
            raise InputError(
                f"{name} is a run that cannot be read: {CONFIG} and {METRICS} are missing or damaged"
            )
        for path in run.sheets.values():
            self.folders.check(path)
        return run


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, METRICS))


def _holder(folder: Path) -> str | None:
    """Return which process trains the run, in words; None if none does."""
    try:
        check_not_held(folder)
    except InputError as error:
        found = str(error).partition(" is in use by ")[2].partition(": wait for it")[0]
        return found or "another process"
    except OSError:
        return None
    return None


def _sentence(holder: str | None) -> str:
    return "." if holder is None else f": {holder}."


def _command(run: RunFiles) -> str:
    """Return the command that started the run, which resumes it too."""
    recorded = run.header.get("command")
    if isinstance(recorded, str) and recorded:
        return recorded
    task, recipe = run.config.get("task", "train"), run.header.get("recipe")
    if task not in COMMANDS or not isinstance(recipe, str) or not recipe:
        return ""
    return f"driftgen {COMMANDS[task]} {recipe} --out {run.folder}"


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
