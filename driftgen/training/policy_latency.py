"""Time per chunk of actions: drifting beside diffusion with the same network, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from driftgen.errors import InputError
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.policy.chunk_samplers import make_sampler
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.policy.environments import TASKS, SimulatedTask
from driftgen.policy.latency import MOST_BATCH, MOST_REPEATS, measure_latency
from driftgen.policy.processor import ACTION
from driftgen.support.atomic_write import atomic_write, check_replaceable, make_folder
from driftgen.support.progress import track
from driftgen.support.provenance import command_line, environment, provenance
from driftgen.support.whole_numbers import check_count
from driftgen.training.policy_config import PolicyConfig
from driftgen.training.policy_task import network_of
from driftgen.training.recipes import load_recipe

__all__ = ["latency_table", "measure_methods"]

EVALUATOR = "median time of one call of predict, from observations to actions in host memory"


class Method(NamedTuple):
    """A way to draw chunks: its name, the method of the network, and the scheduler of diffusion."""

    name: str
    training: str
    scheduler: str | None = None


METHODS = (
    Method("drifting", "drifting"),
    Method("diffusion, DDIM", "diffusion", "ddim"),
    Method("diffusion, DDPM", "diffusion", "ddpm"),
)


def measure_methods(
    recipes: Sequence[str],
    out: Path | None = None,
    *,
    batches: Sequence[int] = (1, 50),
    repeats: int = 30,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Time each method on the network of each recipe, print the table and write the record.

    Weights are random: the time of a call does not depend on them.

    Args:
        recipes: recipes of policies with a simulated task, which gives the shapes.
        out: JSON file; None to print the table only.
        batches: observation histories per call.
        repeats: timed calls of each row.
        device: of the networks; the CPU if None.
    """
    check_count("repeats", repeats, most=MOST_REPEATS)
    for batch in batches:
        check_count("batch", batch, most=MOST_BATCH)
    if out is not None:
        if out.is_dir():
            raise InputError(f"{out} is a folder: give the file to write, such as {out / 'latency.json'}")
        check_replaceable(out)
    for recipe in recipes:  # before the first one is timed
        _task_of(recipe, _policy_config(recipe))
    device = device or torch.device("cpu")
    rows: list[dict[str, Any]] = []
    jobs = [(recipe, method, batch) for recipe in recipes for method in METHODS for batch in batches]
    with track("latency", len(jobs), "ms per chunk") as progress:
        for recipe, method, batch in jobs:
            config = _policy_config(recipe)
            network = _random_network(recipe, config, method.training)
            policy = DriftingPolicy(
                network, sampler=make_sampler(method.training, method.scheduler), device=device
            )
            measured = measure_latency(policy, network.observations, batch=batch, repeats=repeats)
            rows.append(
                {
                    "recipe": recipe,
                    "method": method.name,
                    "parameters": sum(p.numel() for p in network.parameters()),
                    **measured.record(),
                }
            )
            progress(len(rows), measured.milliseconds)
    about = {**provenance(command_line()), "environment": environment(device)}
    record = {"rows": rows, "evaluator": EVALUATOR, **about}
    print(latency_table(rows), end="")
    if out is not None:
        make_folder(out.parent)
        with atomic_write(out) as scratch:
            scratch.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(out)
    return record


def latency_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of the rows."""
    lines = [
        "| network | method | calls | batch | ms per chunk | actions/s | on |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{row['recipe']}, {row['parameters'] / 1e6:.1f} M",
            row["method"],
            str(row["network_calls"]),
            str(row["batch"]),
            f"{row['milliseconds']:.1f}",
            f"{row['actions_per_second']:,.0f}",
            row["device"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _policy_config(recipe: str) -> PolicyConfig:
    config = load_recipe(recipe)
    if not isinstance(config, PolicyConfig):
        raise InputError(f"{recipe} is no recipe of a policy: choose pusht-state, pusht-image or lift-state")
    return config


def _random_network(recipe: str, config: PolicyConfig, method: str) -> PolicyNetwork:
    """Build the network of a recipe for the shapes of its task, with random weights."""
    task, preset = _task_of(recipe, config)
    shapes, low, high = task.observations[preset], *task.action_range
    ranges = {ACTION: {"low": list(low), "high": list(high)}}
    for key, shape in shapes.items():
        if len(shape) == 1:
            ranges[key] = {"low": [-1.0] * shape[0], "high": [1.0] * shape[0]}
    torch.manual_seed(0)
    return network_of(config.model_copy(update={"method": method}), shapes, len(low), ranges)


def _task_of(recipe: str, config: PolicyConfig) -> tuple[SimulatedTask, str]:
    task, preset = TASKS.get(config.environment or ""), config.data.observe or ""
    if task is None or preset not in task.observations:
        raise InputError(
            f"{recipe} has environment={config.environment}, which is no task of the simulators: policy "
            "latency takes recipes with one, such as pusht-state, pusht-image or lift-state"
        )
    return task, preset
