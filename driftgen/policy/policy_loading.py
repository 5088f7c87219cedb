"""Policies by name: packaged ones, saved folders, and the last checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from driftgen.errors import InputError
from driftgen.interop.packaged import find_packaged
from driftgen.policy.environments import TASKS, SimulatedTask, find_task, matching_observations
from driftgen.policy.rollout import Policy, RandomPolicy
from driftgen.support.distributed import choose_device
from driftgen.support.untrusted_files import open_safetensors, reading

__all__ = ["LoadOptions", "checkpoint_steps", "choose_task", "load_policy", "policies_of_run"]

RANDOM = "random"
CHECKPOINTS, STATE = "checkpoints", "state.safetensors"


class LoadOptions(NamedTuple):
    """Options of :func:`load_policy`.

    Attributes:
        task: name of the task; needed by ``random``.
        weights: set of weights of a run.
        device: of the network; a GPU if there is one and this is None.
        scheduler: ``ddpm`` or ``ddim``, for a diffusion policy.
        calls: its network calls per chunk.
    """

    task: str | None = None
    weights: str | None = None
    device: str | None = None
    scheduler: str | None = None
    calls: int | None = None


def load_policy(name: str, options: LoadOptions) -> Policy:
    """Load a policy: a packaged one, a run, a saved folder, a hub name, or ``random``."""
    if name == RANDOM:
        if options.task is None:
            raise InputError("random: name the task with --task")
        return RandomPolicy(options.task)
    if name in TASKS and find_packaged(name) is None and not Path(name).exists():
        raise InputError(f"no policy for {name} comes with driftgen: give the folder of a trained one")
    from driftgen.policy.drifting_policy import DriftingPolicy

    return DriftingPolicy.from_pretrained(
        name,
        weights=options.weights,
        device=str(choose_device(options.device)),
        scheduler=options.scheduler,
        calls=options.calls,
    )


def choose_task(policy: Policy, name: str | None) -> tuple[SimulatedTask, str]:
    """Return the task of a policy and the preset of its observations.

    Without a name it is the one that the policy was trained for, or the only task with such observations.
    """
    name = name or _trained_for(policy)
    network = getattr(policy, "network", None)
    shapes = getattr(network, "observations", None)
    if shapes is None:
        if name is None:
            raise InputError("the policy does not say what it observes: name the task with --task")
        task = find_task(name)
        return task, next(iter(task.observations))
    if name is not None:
        task = find_task(name)
        return task, matching_observations(task, shapes)
    wanted = {key: tuple(shape) for key, shape in shapes.items()}
    found = [
        (t, preset) for t in TASKS.values() for preset, offered in t.observations.items() if offered == wanted
    ]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(f"{key} {list(shape)}" for key, shape in wanted.items())
    if found:
        names = " or ".join(task.name for task, _ in found)
        raise InputError(f"the policy observes {listed}, as in {names}: name the task with --task")
    raise InputError(
        f"the policy observes {listed}, as in no task of {', '.join(TASKS)}: it cannot be simulated"
    )


def _trained_for(policy: Policy) -> str | None:
    """Return the environment that a training run stored with the policy, if it is a task."""
    name = getattr(policy, "source", {}).get("environment")
    return name if name in TASKS else None


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps of a run's checkpoints, in ascending order."""
    folders = (run / CHECKPOINTS).glob("step-*")
    return sorted(
        int(path.name[5:]) for path in folders if path.name[5:].isdigit() and (path / STATE).is_file()
    )


def policies_of_run(run: str, count: int, options: LoadOptions) -> list[tuple[str, Callable[[], Policy]]]:
    """Return name and loader of the averaged weights of a run's last ``count`` checkpoints."""
    if count < 1:
        raise InputError(f"checkpoints={count} must be at least 1")
    steps = checkpoint_steps(Path(run))[-count:]
    if len(steps) < count:
        raise InputError(
            f"{run} has {len(steps)} checkpoints, {count} are asked for: train with --set "
            f"output.keep_last={count}, or ask for fewer with --checkpoints"
        )
    return [(f"{run}, step {step}", partial(_load_checkpoint, run, step, options)) for step in steps]


def _load_checkpoint(run: str, step: int, options: LoadOptions) -> Policy:
    """Load a run's policy with the weights of a checkpoint in place of its newest ones."""
    loaded = load_policy(run, options)
    policy: Any = loaded
    source = getattr(policy, "source", {})
    prefix = f"ema/{source['ema']}/" if "ema" in source else "model/"
    path = Path(run) / CHECKPOINTS / f"step-{step:08d}" / STATE
    with open_safetensors(path, "a checkpoint", "choose another one") as file:
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118, not a mapping
        weights = {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    missing = policy.network.state_dict().keys() - weights.keys()
    if missing:
        raise InputError(f"{path} has no {prefix}{min(missing)}: it belongs to another kind of run")
    with reading(path, "weights of the policy", "it belongs to another kind of run"):
        policy.network.load_state_dict(weights)
    return loaded
