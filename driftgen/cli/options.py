"""Options shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Device", "Out", "Seed"]

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the best one available.")]
