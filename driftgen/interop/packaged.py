"""Trained models that ship with the package: folders of ``driftgen/packaged``, found by name."""

from __future__ import annotations

from pathlib import Path

from driftgen.interop.saved_config import CONFIG

__all__ = ["best_packaged", "find_packaged", "packaged_names"]

BEST_FIRST = ("cifar10", "digits")  # generators of images
FOLDER = Path(__file__).parents[1] / "packaged"


def packaged_names() -> list[str]:
    """Return the names of all models that ship with the package."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{CONFIG}"))


def find_packaged(name: str) -> Path | None:
    """Return the folder of a model that ships with the package; None if there is none of this name."""
    return FOLDER / name if name in packaged_names() else None


def best_packaged() -> str:
    """Return the name of the generator to show where a user names none."""
    return next(name for name in BEST_FIRST if find_packaged(name) is not None)
