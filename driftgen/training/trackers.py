"""Metrics and previews for TensorBoard and Weights & Biases, beside ``metrics.jsonl``."""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from driftgen.errors import InputError
from driftgen.support.atomic_write import atomic_write
from driftgen.support.image_files import open_image
from driftgen.training.task import LoopConfig

__all__ = ["Trackers", "scalars"]

IMAGES = (".png", ".jpg")


class Trackers:
    """Forwards metrics to the enabled trackers; a missing library raises before the run begins."""

    def __init__(self, config: LoopConfig, folder: Path) -> None:
        self.board: Any = None
        self.wandb: Any = None
        if config.output.tensorboard:
            board = _load("torch.utils.tensorboard", "output.tensorboard")
            self.board = board.SummaryWriter(str(folder / "tensorboard"))
        if config.output.wandb is not None:
            library = _load("wandb", "output.wandb")
            values = config.model_dump(mode="json")
            self.image = library.Image
            self.wandb = library.init(
                project=config.output.wandb,
                name=folder.name,
                id=_identity(folder),
                dir=str(folder),
                config=values,
                resume="allow",
            )

    def update(self, row: Mapping[str, Any]) -> None:
        """Log one row of metrics."""
        step = int(row["step"])
        if self.board is not None:
            for name, value in scalars(row):
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(dict(scalars(row)), step=step)

    def log_preview(self, path: Path, step: int) -> None:
        """Log the preview of a step if it is an image."""
        if not path.is_file() or path.suffix not in IMAGES:
            return
        if self.board is not None:
            with open_image(path) as image:
                self.board.add_image("samples", np.asarray(image.convert("RGB")), step, dataformats="HWC")
        if self.wandb is not None:
            self.wandb.log({"samples": self.image(str(path))}, step=step)

    def close(self) -> None:
        """Flush and close the trackers."""
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()


def _identity(folder: Path) -> str:
    """Return the id of the run, stored in its folder so that a resumed run continues the same curves."""
    path = folder / "wandb-id"
    if not path.is_file():
        with atomic_write(path) as scratch:
            scratch.write_text(uuid.uuid4().hex[:8], encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()


def scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a row by name: ``drift/0``, ``scale/layer1``."""
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from scalars(value, f"{name}/")
        elif isinstance(value, list | tuple):
            yield from scalars({str(i): v for i, v in enumerate(value)}, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def _load(module: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise InputError(
            f"{key} is set, but its library is missing: pip install 'driftgen[tracking]', or unset it",
            topic="missing-extra",
        ) from None
