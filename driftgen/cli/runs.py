"""Training and what goes before it: ``train``, ``pretrain``, ``encode``, ``recipes``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from driftgen.cli.options import Device

__all__ = ["encode", "pretrain", "recipes", "train"]

Recipe = Annotated[
    str, typer.Argument(help="A name of driftgen recipes, or a .yaml file.", show_default=False)
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="A value of the recipe: optim.lr=2e-4; may be repeated.")
]
RunFolder = Annotated[
    Path | None, typer.Option(help="The run's folder; runs/RECIPE if not given. Goes on with a run there.")
]
Override = Annotated[
    bool, typer.Option("--override", help="Go on with a run although its configuration differs.")
]
Show = Annotated[bool, typer.Option("--show", help="Print the resolved configuration and leave.")]


def train(
    recipe: Recipe,
    changes: Changes = None,
    out: RunFolder = None,
    override: Override = False,
    show: Show = False,
    device: Device = None,
) -> None:
    """Train a one-step generator; go on where the run in the folder stopped.

    Many processes: torchrun --nproc-per-node 8 -m driftgen train RECIPE
    """
    _start("train", recipe, changes, out, override, show, device)


def pretrain(
    recipe: Recipe,
    changes: Changes = None,
    out: RunFolder = None,
    override: Override = False,
    show: Show = False,
    device: Device = None,
) -> None:
    """Train an encoder (a masked autoencoder) for the generator's loss."""
    _start("pretrain", recipe, changes, out, override, show, device)


def encode(
    images: Annotated[
        Path, typer.Argument(help="A folder of images (by class), an .npz or an .npy.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Folder of the cache.", show_default=False)],
    tokenizer: Annotated[
        str, typer.Option(help="Folder or hub name of the SD-VAE.")
    ] = "stabilityai/sd-vae-ft-mse",
    size: Annotated[int, typer.Option(help="Side of the images in pixels, cropped at the centre.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Images encoded at a time.")] = 64,
    shard_size: Annotated[int, typer.Option(help="Images of a shard.")] = 4096,
    dtype: Annotated[
        str, typer.Option(help="Of the stored latents: float32, bfloat16, float16.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Of the posterior noise.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes that decode images.")] = 2,
    device: Device = None,
) -> None:
    """Encode images once into a cache of latents; goes on where it was stopped.

    Many processes: torchrun --nproc-per-node 8 -m driftgen encode IMAGES OUT
    """
    from driftgen.data.config import Data
    from driftgen.data.images import open_images
    from driftgen.data.latent_encoding import encode_images
    from driftgen.support.progress import track
    from driftgen.tokenizers import SDVAE
    from driftgen.training.distributed import Distributed

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
        print(out if left == 0 else f"{out}: {left} shards are left to other processes")


def recipes() -> None:
    """List the recipes, one line each."""
    from driftgen.training.recipes import recipe_names

    console, found = Console(), recipe_names()
    width = max(len(recipe.name) for recipe in found)
    for task in ("train", "pretrain"):
        console.print(f"[dim]driftgen {task}[/]")
        for recipe in (r for r in found if r.task == task):
            line = f"  [bold]{escape(recipe.name):{width}}[/]  {escape(recipe.about)}"
            console.print(line, no_wrap=True, overflow="ellipsis", crop=False)


def _start(
    task: Literal["train", "pretrain"],
    recipe: str,
    changes: list[str] | None,
    out: Path | None,
    override: bool,
    show: bool,
    device: str | None,
) -> None:
    from driftgen.training.recipes import load_recipe, to_yaml

    config = load_recipe(recipe, changes or [], task)
    if show:
        print(to_yaml(config), end="")
        return
    name = Path(recipe).stem
    _run(task, name, config, out or Path("runs") / name, override, device)


def _run(task: str, name: str, config: Any, folder: Path, override: bool, device: str | None) -> None:
    """Trains in this process, one of many if torchrun started it."""
    from driftgen.report.run_page import write_report
    from driftgen.report.terminal import LiveView
    from driftgen.training.distributed import Distributed
    from driftgen.training.pretrain import pretrain as run_pretraining
    from driftgen.training.trainer import train as run_training

    processes = Distributed.start(device)
    temperatures = config.loss.temperatures if task == "train" else ()
    console = Console(stderr=True, highlight=False, quiet=not processes.is_main)
    try:
        with LiveView(str(folder), config.optim.steps, temperatures, console=console) as view:
            run: Any = run_training if task == "train" else run_pretraining
            complete = run(config, folder, processes, view, name=name, override=override, report=write_report)
    finally:
        processes.close()
    if processes.is_main and complete:
        print(folder / "report.html")
    if not complete:
        raise typer.Exit(130)
