"""Training commands: ``train``, ``pretrain``, ``encode``, ``recipes``."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

import driftgen
from driftgen.cli.options import Device
from driftgen.support.signals import terminable
from driftgen.support.user_paths import expand_user

__all__ = [
    "Changes",
    "DryRun",
    "Options",
    "Override",
    "PolicyRecipe",
    "PolicyRunFolder",
    "Recipe",
    "RunFolder",
    "Show",
    "State",
    "encode",
    "pretrain",
    "recipes",
    "show_network_options",
    "start_training",
    "train",
]

RECIPES = Path(driftgen.__file__).parent / "training" / "recipes"
DATA_PATH = "data.path="

Recipe = Annotated[
    str,
    typer.Argument(
        help="Recipe: a name from driftgen recipes, a .yaml file, or your folder of images.",
        show_default=False,
    ),
]
PolicyRecipe = Annotated[
    str, typer.Argument(help="Recipe: a policy of driftgen recipes, or a .yaml file.", show_default=False)
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change one value: optim.lr=2e-4. Repeatable.")
]
RunFolder = Annotated[
    Path | None,
    typer.Option(help="Folder of the run; a run in it resumes. Default: runs/RECIPE or runs/PHOTOS."),
]
PolicyRunFolder = Annotated[
    Path | None, typer.Option(help="Folder of the run; a run in it resumes. Default: runs/RECIPE.")
]
Override = Annotated[
    bool, typer.Option("--override", help="Resume a run although its configuration differs.")
]
Options = Annotated[
    bool, typer.Option("--options", help="List the options of the recipe's networks and exit.")
]
Size = Annotated[
    Literal["auto", "tiny", "small", "base"] | None,
    typer.Option(help="Size of folder and mae-folder; auto fits the machine.", show_default="auto"),
]
Yes = Annotated[bool, typer.Option("--yes", help="Pretrain an encoder first if there is none, do not ask.")]
Show = Annotated[bool, typer.Option("--show", help="Print the resolved configuration and exit.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Run two steps, print time, memory and disk, and write nothing.")
]
Init = Annotated[
    str | None,
    typer.Option(
        help="Start from the weights of this model: a folder, a run, owner/repository, hf://name, or a model "
        "that ships with the package (cifar10, digits)."
    ),
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
    size: Size = None,
    yes: Yes = False,
    override: Override = False,
    show: Show = False,
    dry_run: DryRun = False,
    options: Options = False,
    device: Device = None,
) -> None:
    """Train a one-step generator, or resume the run in the folder.

    Your own images: driftgen train PHOTOS, a folder with one folder per class.

    Several GPUs: torchrun --nproc-per-node 8 -m driftgen train RECIPE
    """
    if options:
        show_network_options("train", recipe, changes or [], size, device)
        return
    start = [] if init is None else [f"init={init}"]
    ask = partial(typer.confirm, default=True)
    permission = {"pretrain": yes or (ask if sys.stdin.isatty() else False)}
    settings = {"state": state, "override": override, "device": device, **permission}
    start_training("train", recipe, [*(changes or []), *start], out, size, show, dry_run, settings)


def pretrain(
    recipe: Recipe,
    changes: Changes = None,
    out: RunFolder = None,
    state: State = None,
    size: Size = None,
    override: Override = False,
    show: Show = False,
    dry_run: DryRun = False,
    options: Options = False,
    device: Device = None,
) -> None:
    """Train an encoder (a masked autoencoder) for the loss of a generator."""
    if options:
        show_network_options("pretrain", recipe, changes or [], size, device)
        return
    settings = {"state": state, "override": override, "device": device}
    start_training("pretrain", recipe, changes or [], out, size, show, dry_run, settings)


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
    from driftgen.data.locate import locate
    from driftgen.support.distributed import Distributed
    from driftgen.support.progress import track
    from driftgen.tokenizers import SDVAE

    config = Data(path=str(images), size=size, workers=workers)
    locate(str(images))  # raises before the tokenizer is loaded, which raises before workers are started
    processes = Distributed.start(device)
    with ExitStack() as stack:
        stack.callback(processes.close)
        network = SDVAE(tokenizer, batch_size=batch_size).to(processes.device)
        data = open_images(config)
        stack.callback(data.close)
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


def show_network_options(
    task: Literal["train", "pretrain", "policy train"],
    argument: str,
    changes: list[str],
    size: str | None,
    device: str | None,
) -> None:
    """List the options of a recipe's networks."""
    from driftgen.report.name_list import show_options
    from driftgen.training.own_images import name_recipe, plan
    from driftgen.training.recipe_options import recipe_options

    recipe, implied, _ = name_recipe(argument, task)
    config = plan(task, recipe, [*implied, *changes], size=size, device=device)
    show_options(recipe_options(config), Console(highlight=False))


def start_training(
    task: Literal["train", "pretrain", "policy train"],
    argument: str,
    changes: list[str],
    out: Path | None,
    size: str | None,
    show: bool,
    dry_run: bool,
    options: dict[str, Any],
) -> None:
    """Run a training command, or show what it would run with."""
    read = _folder_of_images(argument, changes)
    if read is not None and not show and os.environ.get("RANK", "0") == "0":
        # Importing PyTorch and reading the images take seconds.
        print(f"reading {read} ...", file=sys.stderr, flush=True)
    from driftgen.training.own_images import name_recipe, plan
    from driftgen.training.recipes import to_yaml

    recipe, implied, name = name_recipe(argument, task)
    folder = out or Path("runs") / name
    planned = {"size": size, "folder": folder, "device": options["device"]}
    config: Any = plan(task, recipe, [*implied, *changes], **planned)
    if show:
        print(to_yaml(config), end="")
        return
    if dry_run:
        with terminable():  # the first steps write to a temporary folder
            _dry_run(config, folder, options["override"], options["device"])
        return
    start: Any = driftgen.pretrain if task == "pretrain" else driftgen.train
    run = start(config, folder, name=Path(recipe).stem, **options)
    if not run.complete:
        raise typer.Exit(130)
    if os.environ.get("RANK", "0") == "0":
        print(run.report)
        if task == "train" and sys.stderr.isatty():
            print(f"sample images: driftgen sample {shlex.quote(str(folder))} -n 16", file=sys.stderr)


def _folder_of_images(argument: str, changes: list[str]) -> str | None:
    """Return the folder of images that a training reads, if it names one; found without PyTorch."""
    given = [change.removeprefix(DATA_PATH) for change in changes if change.startswith(DATA_PATH)]
    path = given[-1] if given else argument
    if not expand_user(path).is_dir():
        return None
    is_recipe = not given and (RECIPES / f"{argument}.yaml").is_file()  # also beside a folder of its name
    return None if is_recipe else path


def _dry_run(config: Any, folder: Path, override: bool, device: str | None) -> None:
    from driftgen.report.terminal import LiveView, facts_text
    from driftgen.training.dry_run import dry_run
    from driftgen.training.own_images import notes
    from driftgen.training.run_start import planned_phases
    from driftgen.training.step_clock import show_duration

    quiet = os.environ.get("RANK", "0") != "0"
    phases, told, seconds = planned_phases(config, folder, device), set[str](), 0.0
    output = Console(highlight=False, quiet=quiet)
    for i, phase in enumerate(phases, 1):
        console = Console(stderr=True, highlight=False, quiet=quiet)
        with LiveView(f"dry run of {phase.folder}", 2, console=console) as view:
            options: dict[str, Any] = {"view": view, "device": device, "override": override}
            for line in [line for line in notes(phase.config, phase.folder) if line not in told]:
                told.add(line)
                view.info(line)
            cost = dry_run(phase.config, phase.folder, **options, parts=phase.parts)
        network = "encoder" if phase.config.task == "pretrain" else "generator"
        title = {f"part {i} of {len(phases)}": network} if len(phases) > 1 else {}
        output.print(
            facts_text({**title, **cost.rows}, output.width), end="\n\n" if title else "\n", soft_wrap=True
        )
        seconds += cost.seconds
    if len(phases) > 1:
        output.print(facts_text({"both parts": show_duration(seconds)}, output.width), soft_wrap=True)
