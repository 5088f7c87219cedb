"""The command ``ablate``: the paper's studies as experiments."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from driftgen.cli.options import Device

__all__ = ["ablate"]


def ablate(
    study: Annotated[
        str | None,
        typer.Argument(help="Study: a name from --list, or a .yaml file.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study, which resumes what is in it. Default: runs/ablate/STUDY."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="digits, fashion-mnist or cifar10; the study's first by default.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="Seeds of each case, such as 0,1,2.")] = None,
    cases: Annotated[
        str | None, typer.Option(help="Run these cases only; STUDY --list names them. Separate by commas.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change one value of the base: data.path=cifar10.npz, encoder.optim.steps=500. Repeatable.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Trainings at a time. Default: CPU cores, or 4 on a GPU.")
    ] = None,
    evaluator: Annotated[
        str,
        typer.Option(help="Space of the Fréchet distance: pixels, the FID Inception file, an encoder."),
    ] = "pixels",
    samples: Annotated[int | None, typer.Option(help="Generated samples scored per run.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the studies, or the cases of one.")] = False,
    device: Device = None,
) -> None:
    """Run one of the paper's studies; writes table.md and table.json.

    Without STUDY, list the studies. The same command resumes an interrupted study.
    """
    from driftgen.training.ablation_config import StudyPlan, load_study, parse_names, parse_seeds, study_names

    console = Console()
    if study is None:
        listed = study_names()
        width = max(len(summary.name) for summary in listed)
        for summary in listed:
            console.print(f"[bold]{escape(summary.name):{width}}[/]  {escape(summary.title)}", soft_wrap=True)
            console.print(f"[dim]{'':{width}}  on {', '.join(map(escape, summary.bases))}[/]", soft_wrap=True)
        return
    if listing:
        rows = load_study(study).cases
        width = max(len(case.slug) for case in rows)
        for case in rows:
            console.print(f"[bold]{escape(case.slug):{width}}[/]  {escape(case.label)}", soft_wrap=True)
        return
    from driftgen.training.ablation_run import AblationStudy

    plan = StudyPlan.load(
        study,
        out=out,
        base=base,
        seeds=parse_seeds(seeds),
        cases=parse_names(cases),
        overrides=changes or (),
    )
    command = shlex.join(["driftgen", *sys.argv[1:]])
    runs = AblationStudy(plan, processes, device, evaluator, samples, command)
    table = runs.run()
    print(table.read_text(encoding="utf-8"))
    print(table)
    runs.check_failures()
