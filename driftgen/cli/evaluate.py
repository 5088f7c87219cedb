"""Commands that evaluate models: ``eval``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from driftgen.cli.options import Device, SavedDtype, Seed
from driftgen.errors import InputError

__all__ = ["evaluate"]


def evaluate(
    what: Annotated[
        list[str],
        typer.Argument(
            help="MODEL: a packaged or saved model or a run; or images (folder, .npz, data:digits). "
            "Or: stats DATA OUT.safetensors",
            show_default=False,
            metavar="MODEL | stats DATA OUT",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Real images: folder, .npz, .tar or .parquet files, digits, or a .safetensors file of "
            "driftgen eval stats."
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="FID Inception (.pt, .pth), a pretraining run, or pixels. Default: $DRIFTGEN_INCEPTION."
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Generated images per guidance.")] = 50_000,
    guidance: Annotated[
        str | None, typer.Option(help="Values of alpha: 1.0,1.3,1.6. Default: the model's own.")
    ] = None,
    seed: Seed = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result; resumes. Default: runs/eval/NAME.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images generated at a time.")] = 250,
    dtype: SavedDtype = "as saved",
    size: Annotated[
        int | None, typer.Option(help="For images in files: crop and resize to this side.")
    ] = None,
    channels: Annotated[int, typer.Option(help="For images in files: 1 (gray) or 3 (color).")] = 3,
    fast: Annotated[
        bool, typer.Option("--fast", help="Inception in TF32 on a GPU: 3x as fast, FID within 0.001.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Accept statistics of another evaluator, unknown weights.")
    ] = False,
    card: Annotated[
        bool, typer.Option("--card", help="Write the figures on the card (README.md) of the model.")
    ] = False,
    device: Device = None,
) -> None:
    """Measure FID, KID, precision, recall and more of a model, or store statistics of real images.

    driftgen eval MODEL --data DATA measures a model; a sweep over --guidance also writes a figure.

    driftgen eval stats DATA OUT.safetensors computes reference statistics once, for many evaluations.

    Several GPUs: torchrun --nproc-per-node 8 -m driftgen eval ...
    """
    from driftgen.report.evaluation_files import run_evaluation, run_stats

    command = shlex.join(["driftgen", *sys.argv[1:]])
    if what[0] == "stats":
        if len(what) != 3:
            raise InputError("usage: driftgen eval stats DATA OUT.safetensors --encoder ENCODER")
        source, target = what[1:]
        print(run_stats(source, Path(target), encoder, size, channels, device, fast=fast, force=force))
        return
    if len(what) != 1:
        raise InputError(f"one model at a time: {' '.join(what)}")
    options: dict[str, Any] = {
        "samples": samples,
        "guidance": guidance,
        "seed": seed,
        "batch_size": batch_size,
        "size": size,
        "channels": channels,
    }
    switches: dict[str, Any] = {"fast": fast, "force": force, "dtype": dtype}
    if card:
        from driftgen.report.evaluated_card import card_folder, write_evaluation

        place = card_folder(what[0])
        switches["on_result"] = lambda pipe, record: print(write_evaluation(place, pipe.generator, record))
    try:
        run_evaluation(what[0], data, encoder, out, device, command, **options, **switches)
    except KeyboardInterrupt:
        print(f"stopped: run the same command to resume: {command}", file=sys.stderr)
        raise
