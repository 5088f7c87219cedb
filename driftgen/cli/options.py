"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Device", "Out", "Seed"]

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda; the best there is if not given.")]
