"""``driftgen policy``: train, evaluate and watch policies; collect demonstrations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from driftgen.cli.help_format import App
from driftgen.cli.options import Device
from driftgen.cli.runs import (
    Changes,
    DryRun,
    Options,
    Override,
    PolicyRecipe,
    PolicyRunFolder,
    Show,
    State,
    show_network_options,
    start_training,
)

__all__ = ["policy"]

policy = App(
    help="Robot control in one network call: policies, their scores and videos.", no_args_is_help=True
)

Task = Annotated[
    str | None,
    typer.Option(help="pusht, lift, can or kitchen. Default: the one with the policy's observations."),
]
Processes = Annotated[int | None, typer.Option(help="Simulator processes. Default: one per CPU core.")]
Weights = Annotated[str | None, typer.Option(help="Weights of a run: ema-0.999, live. Default: its average.")]
Scheduler = Annotated[str | None, typer.Option(help="ddpm or ddim, for a diffusion policy.")]
Calls = Annotated[int | None, typer.Option(help="Network calls per chunk, for a diffusion policy.")]


@policy.command()
def train(
    recipe: PolicyRecipe,
    changes: Changes = None,
    out: PolicyRunFolder = None,
    state: State = None,
    override: Override = False,
    show: Show = False,
    dry_run: DryRun = False,
    options: Options = False,
    device: Device = None,
) -> None:
    """Train a policy on demonstrations, or resume the run in the folder.

    Baselines with the same network: --set method=regression, --set method=diffusion
    """
    if options:
        show_network_options("policy train", recipe, changes or [], None, device)
        return
    settings = {"state": state, "override": override, "device": device}
    start_training("policy train", recipe, changes or [], out, None, show, dry_run, settings)


@policy.command("eval")
def evaluate_policy(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Runs or saved policies; several are averaged as checkpoints of one. Or: pusht (comes with "
            "driftgen), random.",
            show_default=False,
            metavar="MODEL...",
        ),
    ],
    task: Task = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the result; resumes. Default: runs/policy-eval/NAME.")
    ] = None,
    checkpoints: Annotated[
        int | None, typer.Option(help="Average the last N checkpoints of a run (the paper: 10).")
    ] = None,
    episodes: Annotated[int, typer.Option(help="Episodes per checkpoint.")] = 50,
    first_seed: Annotated[int, typer.Option(help="Seed of the first episode; they count up.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the policy's noise.")] = 0,
    max_steps: Annotated[int | None, typer.Option(help="Steps of an episode. Default: the task's.")] = None,
    videos: Annotated[int, typer.Option(help="Videos of the N best and N worst episodes.")] = 2,
    stills: Annotated[int, typer.Option(help="Frames of the N best and N worst episodes, as a PNG.")] = 2,
    processes: Processes = None,
    weights: Weights = None,
    scheduler: Scheduler = None,
    calls: Calls = None,
    device: Device = None,
) -> None:
    """Score a policy by Diffusion Policy's protocol: 50 held-out seeds, best score of each episode.

    Writes evaluation.json with seeds, standard errors and latency, videos and stills.
    """
    from driftgen.policy.policy_loading import LoadOptions
    from driftgen.policy.score_files import run_policy_evaluation

    run_policy_evaluation(
        models,
        LoadOptions(task, weights, device, scheduler, calls),
        out,
        checkpoints=checkpoints,
        videos=videos,
        stills=stills,
        episodes=episodes,
        first_seed=first_seed,
        seed=seed,
        max_steps=max_steps,
        processes=processes,
    )


@policy.command()
def rollout(
    model: Annotated[
        str,
        typer.Argument(
            help="A run, a saved policy, pusht (comes with driftgen), or random.", show_default=False
        ),
    ],
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
    video: Annotated[Path | None, typer.Option(help="Video to write: out.mp4.")] = None,
    stills: Annotated[Path | None, typer.Option(help="Frames to write: out.png.")] = None,
    task: Task = None,
    max_steps: Annotated[int | None, typer.Option(help="Steps of an episode. Default: the task's.")] = None,
    weights: Weights = None,
    scheduler: Scheduler = None,
    calls: Calls = None,
    device: Device = None,
) -> None:
    """Simulate one episode; print its score, and write a video or stills.

    The same seed gives the same episode.
    """
    from driftgen.policy.policy_loading import LoadOptions
    from driftgen.policy.score_files import run_single_rollout

    options = LoadOptions(task, weights, device, scheduler, calls)
    run_single_rollout(model, options, seed=seed, video=video, stills=stills, max_steps=max_steps)


@policy.command()
def spread(
    runs: Annotated[
        list[str],
        typer.Argument(help="Training runs on the same demonstrations.", show_default=False, metavar="RUN"),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/policy-spread"),
    chunks: Annotated[int, typer.Option(help="Chunks that each policy draws.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    window: Annotated[
        int | None, typer.Option(help="Training window to observe. Default: the most ambiguous one.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Demonstrations. Default: those of the first run.")] = None,
    scheduler: Scheduler = None,
    device: Device = None,
) -> None:
    """Draw the chunks of several policies from one ambiguous observation, side by side.

    The observation is the one after which demonstrators went the most
    different ways. Writes spread.png and spread.json.
    """
    from driftgen.support.distributed import choose_device
    from driftgen.training.chunk_spread import compare_spread

    compare_spread(
        runs,
        out,
        chunks=chunks,
        seed=seed,
        window=window,
        data=data,
        scheduler=scheduler,
        device=str(choose_device(device)),
    )


@policy.command()
def latency(
    recipes: Annotated[
        list[str] | None,
        typer.Argument(help="Recipes of policies.", metavar="RECIPE", show_default=False),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Observations per call. Default: 1 and 50.")] = None,
    repeats: Annotated[int, typer.Option(help="Timed calls of each row.")] = 30,
    device: Device = None,
) -> None:
    """Time one chunk: drifting, DDIM with 10 and DDPM with 100 calls of the same network.

    Takes the networks of recipes, pusht-state and pusht-image by default. Their
    weights are random: time does not depend on them.
    """
    from driftgen.support.distributed import choose_device
    from driftgen.training.policy_latency import measure_methods

    measure_methods(
        recipes or ["pusht-state", "pusht-image"],
        out,
        batches=batch or [1, 50],
        repeats=repeats,
        device=choose_device(device),
    )


@policy.command()
def lerobot(
    model: Annotated[str, typer.Argument(help="A run or a saved policy.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Folder to write.", show_default=False)],
) -> None:
    """Save a policy for LeRobot, with its processors. Needs lerobot.

    lerobot-eval --policy.path=OUT loads it, see docs/policies.md.
    """
    from driftgen.policy.lerobot_export import export_for_lerobot

    print(export_for_lerobot(model, out))


@policy.command()
def collect(
    task: Annotated[str, typer.Argument(help="lift", show_default=False)],
    episodes: Annotated[int, typer.Option(help="Demonstrations to store; failures are left out.")] = 200,
    out: Annotated[
        Path | None, typer.Option(help="HDF5 file; resumes. Default: runs/TASK-EPISODES.hdf5.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first attempt; they count up.")] = 0,
    images: Annotated[bool, typer.Option("--images", help="Store both cameras, 84 x 84 pixels.")] = False,
    processes: Processes = None,
) -> None:
    """Collect demonstrations of a scripted expert in robomimic's HDF5 layout.

    Needs robosuite: pip install robosuite mujoco==3.3.7 'numpy>=2'
    """
    from driftgen.policy import collect as collecting

    target = Path("runs") / f"{task}-{episodes}.hdf5" if out is None else out
    result = collecting.collect(task, target, episodes, seed=seed, images=images, processes=processes)
    print(
        f"{result.episodes} demonstrations of {result.attempts} attempts ({result.success_rate:.1%}), "
        f"{result.steps:,} steps"
    )
    print(result.path)
