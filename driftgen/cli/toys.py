"""Commands that need no data: ``toy``, ``demo`` and ``doctor``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from driftgen.cli.options import Out, Seed
from driftgen.errors import InputError, unknown_name

if TYPE_CHECKING:
    from driftgen.training.toy_study import ToyConfig

__all__ = ["demo", "doctor", "toy"]


def toy(
    distribution: Annotated[
        str | None,
        typer.Argument(
            help="bimodal, eight-gaussians, swiss-roll, checkerboard, two-moons, "
            "or a .npy file with points \\[n, 2].",
            show_default=False,
        ),
    ] = None,
    init: Annotated[str, typer.Option(help="Initial distribution: between, far or collapsed.")] = "between",
    generator: Annotated[
        bool, typer.Option("--generator/--points", help="Train an MLP, or move points along the field.")
    ] = False,
    out: Out = Path("runs/toy"),
    steps: Annotated[int | None, typer.Option(help="Steps; 150 for points, 800 for an MLP.")] = None,
    samples: Annotated[
        int | None, typer.Option(help="Generated samples per step; 512 for points, 256 for an MLP.")
    ] = None,
    positives: Annotated[int, typer.Option(help="Data points per step.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="Kernel temperature; the default depends on the distribution.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="laplace, gaussian or inverse_multiquadric.")] = "laplace",
    normalization: Annotated[str, typer.Option(help="both, y, none or sinkhorn.")] = "both",
    attraction: Annotated[float, typer.Option(help="Factor of the attraction V+.")] = 1.0,
    repulsion: Annotated[float, typer.Option(help="Factor of the repulsion V-.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="Learning rate of the MLP.")] = 4e-3,
    seed: Seed = 0,
    study: Annotated[
        str | None,
        typer.Option(help="antisymmetry: compare runs with unbalanced attraction and repulsion."),
    ] = None,
    play: Annotated[
        bool, typer.Option("--play", help="Open the playground, a page to watch and to change all this.")
    ] = False,
) -> None:
    """Evolve a 2-D distribution toward data; writes evolution.png, .gif and report.html."""
    from driftgen.data.toy import DISTRIBUTIONS, get_toy
    from driftgen.report.toy_files import metric_rows, study_table, write_evolution, write_study
    from driftgen.report.toy_page import write_toy_page
    from driftgen.support.atomic_write import make_folder
    from driftgen.support.progress import drawing, track
    from driftgen.training.toy_study import ANTISYMMETRY, ToyConfig, antisymmetry_study, evolve

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
    if play:
        _play(distribution, config)
        return
    if distribution is None:
        raise InputError(f"Missing argument: give a distribution ({', '.join(DISTRIBUTIONS)}) or --play")
    target = get_toy(distribution)
    make_folder(out)
    console = Console()
    if study:
        with track("anti-symmetry", len(ANTISYMMETRY) * config.total_steps, "drift") as on_step:
            runs = antisymmetry_study(target, config, on_step)
        with drawing():
            paths = write_study(runs, out, _command())
        print(study_table(runs))
    else:
        with track(f"{target.name} {config.init}", config.total_steps, "drift") as on_step:
            evolution = evolve(target, config, on_step)
        with drawing():
            paths = [*write_evolution(evolution, out, _command()), write_toy_page(out)]
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, value in metric_rows(evolution.metrics).items():
            table.add_row(name, value)
        console.print(table)
    for path in paths:
        print(path)


def _play(distribution: str | None, config: ToyConfig) -> None:
    """Open the playground with the settings that it shares with a run."""
    from driftgen.data.toy import DISTRIBUTIONS
    from driftgen.studio.playground_page import PLAYGROUND, open_page, playground_url

    if distribution is not None and distribution not in DISTRIBUTIONS:
        raise unknown_name("distribution", distribution, DISTRIBUTIONS)
    print(PLAYGROUND)
    url = playground_url(
        {
            "target": distribution,
            "start": config.init,
            "mover": "generator" if config.generator else "points",
            "temperature": config.temperature,
            "kernel": config.kernel,
            "normalization": config.normalization,
            "attraction": config.attraction,
            "repulsion": config.repulsion,
            "seed": config.seed,
        }
    )
    if not open_page(url):
        print(f"No browser was found here. Open the file in one; with these settings:\n{url}")


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write to. Default: runs/demo, or runs/demo-quick with --quick.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Train for seconds, to see that everything works.")
    ] = False,
) -> None:
    """Train a generator of digits, sample and evaluate it; writes report.html."""
    from driftgen.demo import QUICK, QUICK_TOY_STEPS, demo_config, run_demo
    from driftgen.evaluation.digits import BARS
    from driftgen.report.terminal import LiveView

    _check_seed(seed)
    out = out or Path("runs/demo-quick" if quick else "runs/demo")
    changes, toy_steps = (QUICK, QUICK_TOY_STEPS) if quick else ((), None)
    config = demo_config(seed, changes)
    with LiveView(str(out), config.optim.steps, config.loss.temperatures) as view:
        result = run_demo(out, view, seed, changes, toy_steps)
    if result is None:
        raise typer.Exit(130)
    page, figures = result
    columns = ["1,000 digits, guidance 1.5", "measured", "target"]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in columns[:2] if quick else columns:
        table.add_column(column, justify="left" if column.startswith("1") else "right")
    for name, bar in BARS.items():
        target = f"{'at most' if name == 'copied' else 'at least'} {bar}"
        table.add_row(name.replace("_", ", "), f"{figures[name]:.3f}", *([] if quick else [target]))
    Console().print(table)
    if quick:
        print("A quick run: driftgen demo trains for minutes, to better digits.")
    print(page)


def doctor() -> None:
    """Report Python, torch, devices and optional extras, with installation commands."""
    from driftgen.doctor import examine

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    marks = {True: "[green]ok[/]", False: "[red]!![/]", None: "[dim]--[/]"}
    for finding in examine():
        advice = f"\n[dim]{escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(marks[finding.ok], escape(finding.name), escape(finding.value) + advice)
    Console().print(table)


def _check_seed(seed: int) -> None:
    """Raise if the seed is negative or does not fit into 63 bits."""
    if not 0 <= seed < 2**63:
        raise InputError(f"seed={seed} must be an integer from 0 to 2^63 - 1")


def _command() -> str:
    return shlex.join(["driftgen", *sys.argv[1:]])
