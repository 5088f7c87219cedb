"""Training commands: ``train``, ``pretrain``, ``encode``, ``recipes``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import driftgen
from driftgen.cli.options import Device

__all__ = [
    "Changes",
    "DryRun",
    "Options",
    "Override",
    "Recipe",
    "RunFolder",
    "Show",
    "State",
    "encode",
    "pretrain",
    "recipes",
    "start",
    "train",
]

Recipe = Annotated[
    str, typer.Argument(help="Recipe: a name from driftgen recipes, or a .yaml file.", show_default=False)
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change one value: optim.lr=2e-4. Repeatable.")
]
RunFolder = Annotated[
    Path | None, typer.Option(help="Folder of the run; a run in it resumes. Default: runs/RECIPE.")
]
Override = Annotated[
    bool, typer.Option("--override", help="Resume a run although its configuration differs.")
]
Options = Annotated[
    bool, typer.Option("--options", help="List the options of the recipe's networks and exit.")
]
Show = Annotated[bool, typer.Option("--show", help="Print the resolved configuration and exit.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Run two steps, print time, memory and disk, and write nothing.")
]
Init = Annotated[
    str | None,
    typer.Option(help="Start from the weights of this model: a folder, a run, owner/repository, hf://name."),
]


State = Annotated[
    Path | None,
    typer.Option(help="Resume from this compact state of driftgen convert state, in a new folder."),
]


def train(
    recipe: Recipe,
    changes: Changes = None,
    out: RunFolder = None,
    init: Init = None,
    state: State = None,
    override: Override = False,
    show: Show = False,
    dry_run: DryRun = False,
    options: Options = False,
    device: Device = None,
) -> None:
    """Train a one-step generator, or resume the run in the folder.

    Several GPUs: torchrun --nproc-per-node 8 -m driftgen train RECIPE
    """
    first = [] if init is None else [f"init={init}"]
    start("train", recipe, [*(changes or []), *first], out, state, override, show, dry_run, options, device)


def pretrain(
    recipe: Recipe,
    changes: Changes = None,
    out: RunFolder = None,
    state: State = None,
    override: Override = False,
    show: Show = False,
    dry_run: DryRun = False,
    options: Options = False,
    device: Device = None,
) -> None:
    """Train an encoder (a masked autoencoder) for the loss of a generator."""
    start("pretrain", recipe, changes or [], out, state, override, show, dry_run, options, device)


def encode(
    images: Annotated[
        Path,
        typer.Argument(
            help="Folder of images (by class), .npz, .npy, .tar or .parquet files.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the latent cache.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option(help="SD-VAE: a folder or a hub name.")
    ] = "stabilityai/sd-vae-ft-mse",
    size: Annotated[int, typer.Option(help="Image size in pixels, center-cropped.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 64,
    shard_size: Annotated[int, typer.Option(help="Images per shard.")] = 4096,
    dtype: Annotated[str, typer.Option(help="Stored dtype: float32, bfloat16, float16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the posterior noise.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that decode images.")] = 2,
    device: Device = None,
) -> None:
    """Encode images into a latent cache, or resume a stopped encoding.

    Several GPUs: torchrun --nproc-per-node 8 -m driftgen encode IMAGES OUT
    """
    from driftgen.data.config import Data
    from driftgen.data.images import open_images
    from driftgen.data.latent_encoding import encode_images
    from driftgen.support.distributed import Distributed
    from driftgen.support.progress import track
    from driftgen.tokenizers import SDVAE

    processes = Distributed.start(device)
    data = open_images(Data(path=str(images), size=size, workers=workers))
    try:
        network = SDVAE(tokenizer, batch_size=batch_size).to(processes.device)
        console = Console(stderr=True, quiet=not processes.is_main)
        with track("encoding", len(data.labels), "share done", console) as on_step:
            left = encode_images(
                data,
                network,
                out,
                batch_size=batch_size,
                shard_size=shard_size,
                dtype=dtype,
                seed=seed,
                rank=processes.rank,
                world=processes.world_size,
                on_step=lambda done, total: on_step(done, done / total),
            )
    finally:
        data.close()
        processes.close()
    if processes.is_main:
        for name in getattr(data, "unreadable", []):
            console.print(f"cannot be read: {name}", highlight=False, markup=False)
        print(out if left == 0 else f"{out}: {left} shards still belong to other processes")


def recipes() -> None:
    """List the packaged recipes."""
    from driftgen.report.name_list import show_names
    from driftgen.training.recipes import recipe_names

    sections = {
        f"driftgen {command}": {r.name: r.about for r in recipe_names() if r.task == task}
        for task, command in {"train": "train", "pretrain": "pretrain", "policy": "policy train"}.items()
    }
    show_names(sections, Console(highlight=False))


def start(
    command: Literal["train", "pretrain", "policy train"],
    recipe: str,
    changes: list[str],
    out: Path | None,
    state: Path | None,
    override: bool,
    show: bool,
    dry_run: bool,
    options: bool,
    device: str | None,
) -> None:
    """Run a training command, or show what it would run with."""
    from driftgen.report.name_list import show_options
    from driftgen.training.recipe_options import recipe_options
    from driftgen.training.recipes import load_recipe, to_yaml

    config: Any = load_recipe(recipe, changes, command)
    if options:
        show_options(recipe_options(config), Console(highlight=False))
        return
    if show:
        print(to_yaml(config), end="")
        return
    name = Path(recipe).stem
    train_run = driftgen.pretrain if command == "pretrain" else driftgen.train
    folder = out or Path("runs") / name
    if dry_run:
        _dry_run(config, folder, override, device)
        return
    run = train_run(config, folder, name=name, state=state, override=override, device=device)
    if not run.complete:
        raise typer.Exit(130)
    if os.environ.get("RANK", "0") == "0":
        print(run.report)


def _dry_run(config: Any, folder: Path, override: bool, device: str | None) -> None:
    from driftgen.report.terminal import LiveView, facts_text
    from driftgen.training.dry_run import dry_run

    quiet = os.environ.get("RANK", "0") != "0"
    console = Console(stderr=True, highlight=False, quiet=quiet)
    with LiveView(f"dry run of {folder}", 2, console=console) as view:
        rows = dry_run(config, folder, view=view, device=device, override=override)
    console = Console(highlight=False, quiet=quiet)
    console.print(facts_text(rows, console.width), soft_wrap=True)
