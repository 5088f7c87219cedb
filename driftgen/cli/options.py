"""Options shared by several commands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Device", "Out", "SavedDtype", "Seed", "Tokenizer", "Weights", "folder_of_model"]

Out = Annotated[Path, typer.Option(help="Folder to write to.")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: the best one available.")]
SavedDtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or as saved.")]
Tokenizer = Annotated[str | None, typer.Option(help="SD-VAE that decodes latents: a folder or a hub name.")]
Weights = Annotated[
    str | None,
    typer.Option(help="Weights of a run: ema-0.999, live (without averaging), best. Default: first EMA."),
]


def folder_of_model(kind: str, model: str) -> Path:
    """Return ``runs/KIND/NAME`` for a model: a second model does not meet the files of the first."""
    name = os.path.abspath(model) if os.path.exists(model) else model
    return Path("runs", kind, Path(name).name or "model")
