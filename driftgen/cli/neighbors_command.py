"""The command ``neighbors``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from driftgen.cli.options import Device, Tokenizer, folder_of_model

__all__ = ["neighbors"]


def neighbors(
    model: Annotated[
        str,
        typer.Argument(
            help="Saved model, training run, artifact of the authors, owner/repository, or hf://name.",
            show_default=False,
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Training images: a folder (by class), .npz, .npy, .tar or .parquet files, or digits. "
            "Default: those of the run."
        ),
    ] = None,
    encoder: Annotated[
        str, typer.Option(help="Features to compare: pixels, or a pretrained encoder (folder, run).")
    ] = "pixels",
    samples: Annotated[int, typer.Option(help="Number of samples.")] = 1000,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance alpha, 1 (none) or more. Default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    show: Annotated[int, typer.Option(help="Samples shown: the first ones, and the closest ones.")] = 10,
    nearest: Annotated[int, typer.Option(help="Training images shown beside each sample.")] = 5,
    heldout: Annotated[
        str | None,
        typer.Option(help="Real images not trained on. Default: training images, each against the others."),
    ] = None,
    resize: Annotated[
        bool, typer.Option("--resize", help="Center-crop and resize arrays to the model's images.")
    ] = False,
    tokenizer: Tokenizer = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: runs/neighbors/NAME of the model.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 64,
    device: Device = None,
) -> None:
    """Show samples beside their nearest training images, and count near-copies.

    Writes neighbors.png and neighbors.json.
    """
    from driftgen.report.neighbor_files import compare_with_training, summary_rows, threshold_text
    from driftgen.support.progress import track

    search, paths = compare_with_training(
        model,
        out or folder_of_model("neighbors", model),
        shlex.join(["driftgen", *sys.argv[1:]]),
        data=data,
        heldout=heldout,
        resize=resize,
        encoder=encoder,
        samples=samples,
        guidance=guidance,
        seed=seed,
        show=show,
        nearest=nearest,
        tokenizer=tokenizer,
        batch_size=batch_size,
        device=device,
        progress=track,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "samples", "held-out"):
        table.add_column(column, justify="right" if column else "left")
    for row in summary_rows(search):
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(threshold_text(search), highlight=False)
    for path in paths:
        print(path)
