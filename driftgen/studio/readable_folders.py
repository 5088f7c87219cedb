"""The folders that the studio may read: runs and data. Everything else is refused, also behind links."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from driftgen.errors import InputError
from driftgen.support.user_paths import expand_user

__all__ = ["ReadableFolders"]

LONGEST_TEXT = 4096  # characters of a path that a page sends


class ReadableFolders(NamedTuple):
    """The folder of all runs and the folder of all datasets.

    A path counts by its target: ``..`` and links that lead out of both folders are refused.
    """

    runs: Path
    data: Path

    def run(self, name: str) -> Path:
        """Return the folder of a run by its path below the folder of runs."""
        return self._existing(self.runs, name, "run", "--runs")

    def dataset(self, name: str) -> Path:
        """Return a folder or a file of images by its path below the folder of data."""
        return self._existing(self.data, name, "data", "--data")

    def contains(self, path: Path, more: Iterable[Path] = ()) -> bool:
        """Return True if the target of a path is inside one of both folders, or of ``more``."""
        try:
            target = path.resolve()
            return any(target.is_relative_to(root.resolve()) for root in (self.runs, self.data, *more))
        except (OSError, RuntimeError, ValueError):  # a loop of links, a null byte
            return False

    def check(self, path: Path, more: Iterable[Path] = ()) -> Path:
        """Return the path; raise if its target is elsewhere."""
        if not self.contains(path, more):
            raise InputError(
                f"{path} leads outside {self.runs} and {self.data}, the folders that the studio may read: "
                "start it with --runs or --data"
            )
        return path

    def check_tree(self, folder: Path, more: Iterable[Path] = ()) -> Path:
        """Return the folder; raise if the target of anything in it is elsewhere."""
        self.check(folder, more)
        # Links among folders are not followed, so that nothing below them is visited.
        for path in folder.rglob("*"):
            if path.is_symlink():
                self.check(path, more)
        return folder

    def _existing(self, root: Path, name: str, what: str, option: str) -> Path:
        if not name or not name.strip() or len(name) > LONGEST_TEXT or "\0" in name:
            raise InputError(f"no {what} is chosen: choose one of {root}")
        path = root / expand_user(name)
        try:
            inside = path.resolve().is_relative_to(root.resolve())
        except (OSError, RuntimeError):
            inside = False
        if not inside:
            raise InputError(f"{name} is outside {root}: start the studio with {option} to read it")
        try:
            exists = path.exists()
        except OSError:
            exists = False
        if not exists:
            raise InputError(f"{name} does not exist in {root}")
        return path
