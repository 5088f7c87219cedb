"""Commands for policies: ``driftgen policy train``."""

from __future__ import annotations

from driftgen.cli.help_format import App
from driftgen.cli.options import Device
from driftgen.cli.runs import Changes, DryRun, Options, Override, Recipe, RunFolder, Show, State, start

__all__ = ["policy"]

policy = App(
    help="Robot control: train and run policies that predict a chunk of actions.", no_args_is_help=True
)


@policy.command()
def train(
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
    """Train a policy on demonstrations, or resume the run in the folder.

    Baselines with the same network: --set method=regression, --set method=diffusion
    """
    start("policy train", recipe, changes or [], out, state, override, show, dry_run, options, device)
