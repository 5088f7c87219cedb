"""The ``driftgen`` command: one thin verb each, no logic."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import driftgen
from driftgen.errors import InputError, unknown_name

__all__ = ["app", "main"]

app = typer.Typer(
    help="Drifting Models: generators that turn noise into a sample in one network call.",
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(f"driftgen {driftgen.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
    else:
        return
    raise typer.Exit


@app.command()
def toy(
    distribution: Annotated[
        str,
        typer.Argument(
            help="bimodal, eight-gaussians, swiss-roll, checkerboard, two-moons, "
            "or a .npy file of points \\[n, 2].",
            show_default=False,
        ),
    ],
    init: Annotated[str, typer.Option(help="Where q starts: between, far, collapsed.")] = "between",
    generator: Annotated[
        bool, typer.Option("--generator/--points", help="Train an MLP, or move bare points by the field.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/toy"),
    steps: Annotated[int | None, typer.Option(help="Steps (150 for points, 800 for an MLP).")] = None,
    samples: Annotated[int | None, typer.Option(help="Generated at a time (512, or 256 for an MLP).")] = None,
    positives: Annotated[int, typer.Option(help="Data points drawn each step.")] = 512,
    temperature: Annotated[float | None, typer.Option(help="Kernel temperature; by distribution.")] = None,
    kernel: Annotated[str, typer.Option(help="laplace, gaussian, inverse_multiquadric.")] = "laplace",
    normalization: Annotated[str, typer.Option(help="both, y, none, sinkhorn.")] = "both",
    attraction: Annotated[float, typer.Option(help="Factor of the attraction V+.")] = 1.0,
    repulsion: Annotated[float, typer.Option(help="Factor of the repulsion V-.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="Adam's, for an MLP.")] = 4e-3,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    study: Annotated[
        str | None,
        typer.Option(help="antisymmetry: repeat with attraction and repulsion out of balance, and compare."),
    ] = None,
) -> None:
    """Let a 2-D distribution drift; writes evolution.png, evolution.gif and metrics.json."""
    from driftgen.data.toy import get_toy
    from driftgen.files import make_folder
    from driftgen.progress import drawing, track
    from driftgen.report.demo import metric_rows
    from driftgen.report.toy import study_table, write_evolution, write_study
    from driftgen.training.toy import ANTISYMMETRY, ToyConfig, antisymmetry_study, evolve

    config = ToyConfig(
        init=init,
        generator=generator,
        steps=steps,
        samples=samples,
        positives=positives,
        temperature=temperature,
        kernel=kernel,
        normalization=normalization,
        attraction=attraction,
        repulsion=repulsion,
        learning_rate=learning_rate,
        seed=seed,
    )
    if study not in (None, "antisymmetry"):
        raise unknown_name("study", study, ["antisymmetry"])
    target = get_toy(distribution)
    make_folder(out)
    console = Console()
    if study:
        with track("anti-symmetry", len(ANTISYMMETRY) * config.total_steps, "drift") as on_step:
            runs = antisymmetry_study(target, config, on_step)
        with drawing():
            written = write_study(runs, out, _command())
        print(study_table(runs))
    else:
        with track(f"{target.name} {config.init}", config.total_steps, "drift") as on_step:
            evolution = evolve(target, config, on_step)
        with drawing():
            written = write_evolution(evolution, out, _command())
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in metric_rows(evolution.metrics).items():
            table.add_row(name, value)
        console.print(table)
    for path in written:
        print(path)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
) -> None:
    """Train a generator of digits here and now, sample it, evaluate it; writes report.html."""
    from driftgen.evaluation.digits import BARS
    from driftgen.report.demo import demo_config, run_demo
    from driftgen.report.live import LiveView

    _check_seed(seed)
    config = demo_config(seed)
    with LiveView(str(out), config.optim.steps, config.loss.temperatures) as view:
        done = run_demo(out, view, seed)
    if done is None:
        raise typer.Exit(130)
    page, figures = done
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("1,000 digits, guidance 1.5", "measured", "aim"):
        table.add_column(column, justify="left" if column.startswith("1") else "right")
    for name, bar in BARS.items():
        sign = "at most" if name == "copied" else "at least"
        table.add_row(name.replace("_", ", "), f"{figures[name]:.3f}", f"{sign} {bar}")
    Console().print(table)
    print(page)


@app.command()
def doctor() -> None:
    """Say what this machine has: Python, torch, devices, optional extras and how to get each."""
    from driftgen.doctor import examine

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    marks = {True: "[green]ok[/]", False: "[red]!![/]", None: "[dim]--[/]"}
    for finding in examine():
        advice = f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(marks[finding.ok], escape(finding.name), escape(finding.value) + advice)
    Console().print(table)


@app.command()
def train(
    recipe: Annotated[
        str,
        typer.Argument(help="A name of driftgen recipes, or a .yaml file.", show_default=False),
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A value of the recipe: optim.lr=2e-4; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; runs/RECIPE if not given. Goes on with a run there."),
    ] = None,
    override: Annotated[
        bool, typer.Option("--override", help="Go on with a run although its configuration differs.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved configuration and leave.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda; the best there is if not given.")] = None,
) -> None:
    """Train a one-step generator; go on where the run in the folder stopped.

    Many processes: torchrun --nproc-per-node 8 -m driftgen train RECIPE
    """
    from driftgen.training.recipe_book import load_recipe, to_yaml

    config = load_recipe(recipe, changes or [], "train")
    if show:
        print(to_yaml(config), end="")
        return
    _run("train", recipe, config, out, override, device)


@app.command()
def pretrain(
    recipe: Annotated[
        str, typer.Argument(help="A name of driftgen recipes, or a .yaml file.", show_default=False)
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--set", help="A value of the recipe: optim.lr=2e-4; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; runs/RECIPE if not given. Goes on with a run there."),
    ] = None,
    override: Annotated[
        bool, typer.Option("--override", help="Go on with a run although its configuration differs.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved configuration and leave.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda; the best there is if not given.")] = None,
) -> None:
    """Train an encoder (a masked autoencoder) for the generator's loss."""
    from driftgen.training.recipe_book import load_recipe, to_yaml

    config = load_recipe(recipe, changes or [], "pretrain")
    if show:
        print(to_yaml(config), end="")
        return
    _run("pretrain", recipe, config, out, override, device)


@app.command()
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
    device: Annotated[str | None, typer.Option(help="cpu, cuda; the best there is if not given.")] = None,
) -> None:
    """Encode images once into a cache of latents; goes on where it was stopped.

    Many processes: torchrun --nproc-per-node 8 -m driftgen encode IMAGES OUT
    """
    from driftgen.data.images import open_images
    from driftgen.data.latents import encode_images
    from driftgen.progress import track
    from driftgen.tokenizers import SDVAE
    from driftgen.training.config import Data
    from driftgen.training.processes import Processes

    processes = Processes.start(device)
    data = open_images(Data(path=str(images), size=size, workers=workers))
    try:
        network = SDVAE(tokenizer, batch_size=batch_size).to(processes.device)
        console = Console(stderr=True, quiet=not processes.first)
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
                world=processes.world,
                on_step=lambda done, total: on_step(done, done / total),
            )
    finally:
        data.close()
        processes.leave()
    if processes.first:
        print(out if left == 0 else f"{out}: {left} shards are left to other processes")


@app.command()
def recipes() -> None:
    """List the recipes, one line each."""
    from driftgen.training.recipe_book import recipe_names

    console, found = Console(), recipe_names()
    width = max(len(recipe.name) for recipe in found)
    for task in ("train", "pretrain"):
        console.print(f"[dim]driftgen {task}[/]")
        for recipe in (r for r in found if r.task == task):
            line = f"  [bold]{escape(recipe.name):{width}}[/]  {escape(recipe.about)}"
            console.print(line, no_wrap=True, overflow="ellipsis", crop=False)


@app.command()
def sample(
    model: Annotated[
        str,
        typer.Argument(
            help="A saved model, a training run, an artifact of the authors, owner/repository, or hf://name.",
            show_default=False,
        ),
    ],
    labels: Annotated[
        str | None, typer.Option(help="Classes: 3,5 or 0-9 or names; all in turn if not given.")
    ] = None,
    number: Annotated[
        int | None, typer.Option("--number", "-n", help="How many images; as many as labels if not given.")
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="alpha, 1 (none) or more; the model's own if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Image i of a seed is always the same.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/samples"),
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or hub name of the SD-VAE that decodes latents.")
    ] = None,
    latents: Annotated[
        bool, typer.Option("--latents", help="Write latents, undecoded, and no images.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16; as saved if not given.")
    ] = "as saved",
    batch_size: Annotated[int, typer.Option(help="Images made at a time.")] = 32,
) -> None:
    """Sample images, one network call each: single PNGs and a sheet of them, grid.png."""
    from driftgen.pipeline import DriftPipeline
    from driftgen.progress import track
    from driftgen.report.samples import parse_labels, write_latents, write_samples

    pipe = DriftPipeline.from_pretrained(
        model, device=device, dtype=_number_type(dtype), tokenizer=tokenizer, batch_size=batch_size
    )
    chosen = pipe.labels(parse_labels(labels), number)
    alpha = pipe.check(guidance=guidance, seed=seed, output="latent" if latents else "pil")
    if latents:
        print(write_latents(pipe, out, chosen, guidance=alpha, seed=seed))
        return
    about = {"model": model, "dtype": dtype, "tokenizer": tokenizer}
    with track("sampling", len(chosen), "network calls per image") as on_step:
        sheet = write_samples(pipe, out, chosen, guidance=alpha, seed=seed, about=about, on_step=on_step)
    print(sheet)


convert = typer.Typer(
    help="Turn the authors' released artifacts into saved models, and back.", no_args_is_help=True
)
app.add_typer(convert, name="convert")


@convert.command()
def official(
    folder: Annotated[str, typer.Argument(help="The artifact's folder, or hf://name.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write to.", show_default=False)],
) -> None:
    """An artifact of the authors (flax) -> config.json, model.safetensors, README.md."""
    from driftgen.interop.convert import from_official

    print(from_official(folder, out))


@convert.command("to-official")
def to_official(
    folder: Annotated[Path, typer.Argument(help="The folder of a saved model.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to write to.", show_default=False)],
) -> None:
    """A saved model -> an artifact that the authors' code reads, bit for bit what it came from."""
    from driftgen.interop import convert as conversion

    print(conversion.to_official(folder, out))


def main() -> None:
    """Runs the command. Wrong input ends in one line and exit code 2."""
    try:
        code: Any = app(standalone_mode=False)
    except InputError as error:
        code = _fail(str(error))
    except KeyboardInterrupt:
        code = 130
    except OSError as error:
        code = _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error))
    except Exception as error:
        # Usage errors come as different classes in different versions of the command library, all with this
        # method.
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        code = _fail(f"{message().rstrip('.')}; see 'driftgen --help'")
    if code == 130:
        print("driftgen: stopped", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> int:
    print(f"driftgen: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(task: str, recipe: str, config: Any, out: Path | None, override: bool, device: str | None) -> None:
    """Trains in this process, one of many if torchrun started it."""
    from driftgen.report.live import LiveView
    from driftgen.training.pretrain import pretrain as run_pretraining
    from driftgen.training.processes import Processes
    from driftgen.training.trainer import train as run_training

    name = Path(recipe).stem
    folder = out or Path("runs") / name
    processes = Processes.start(device)
    temperatures = config.loss.temperatures if task == "train" else ()
    console = Console(stderr=True, highlight=False, quiet=not processes.first)
    try:
        with LiveView(str(folder), config.optim.steps, temperatures, console=console) as view:
            run: Any = run_training if task == "train" else run_pretraining
            complete = run(config, folder, processes, view, name=name, override=override)
    finally:
        processes.leave()
    if processes.first and complete:
        print(folder / "report.html")
    if not complete:
        raise typer.Exit(130)


def _check_seed(seed: int) -> None:
    """Seeds are whole numbers that fit 63 bits."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed} must be a whole number from 0 to 2^63 - 1")


def _number_type(name: str) -> Any:
    import torch

    types = {"as saved": None, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in types:
        raise unknown_name("dtype", name, types)
    return types[name]


def _command() -> str:
    return shlex.join(["driftgen", *sys.argv[1:]])
