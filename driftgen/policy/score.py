"""Evaluation of policies by Diffusion Policy's protocol: held-out seeds, best score of each episode."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat
from torch import nn

from driftgen.errors import InputError
from driftgen.policy.environments import SimulatedTask, find_task, simulator_versions
from driftgen.policy.latency import measure_latency
from driftgen.policy.rollout import Policy, Rollout, chunk_sizes, run_rollouts
from driftgen.policy.simulation import MOST_EPISODES, check_episode_seeds
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.checksum import weights_checksum
from driftgen.support.progress import track
from driftgen.support.provenance import environment, provenance
from driftgen.support.untrusted_files import read_json
from driftgen.support.whole_numbers import check_count, check_seed

__all__ = ["EPISODES", "FIRST_SEED", "Summary", "evaluate_policies", "score_table", "summarize"]

FIRST_SEED, EPISODES = 100_000, 50  # held out: demonstrations and training use smaller seeds
EVALUATOR = (
    "Diffusion Policy's protocol: best score of each episode, mean over episodes and checkpoints; standard "
    "error over episodes, each averaged over checkpoints"
)


class Summary(NamedTuple):
    """Mean score of several checkpoints on the same seeds.

    Attributes:
        mean: over checkpoints and seeds.
        standard_error: of the mean over seeds, after averaging each seed over checkpoints; None for one
            seed.
        deviation: standard deviation of the checkpoints' means; None for one checkpoint.
    """

    mean: float
    standard_error: float | None
    deviation: float | None


def summarize(scores: ArrayLike) -> Summary:
    """Summarize scores ``[checkpoints, seeds]``.

    Checkpoints share seeds, so their episodes are not independent: the error comes from the seeds alone.
    """
    table = np.asarray(scores, np.float64)
    by_seed, by_checkpoint = table.mean(axis=0), table.mean(axis=1)
    error = float(by_seed.std(ddof=1) / np.sqrt(len(by_seed))) if len(by_seed) > 1 else None
    spread = float(by_checkpoint.std(ddof=1)) if len(by_checkpoint) > 1 else None
    return Summary(float(table.mean()), error, spread)


def evaluate_policies(
    models: Sequence[tuple[str, Callable[[], Policy]]],
    task: str,
    preset: str,
    out: Path,
    *,
    episodes: int = EPISODES,
    first_seed: int = FIRST_SEED,
    seed: int = 0,
    max_steps: int | None = None,
    processes: int | None = None,
    latency: bool = True,
    command: str = "",
) -> tuple[dict[str, Any], list[Rollout]]:
    """Evaluate checkpoints of one policy and write ``evaluation.json``.

    The file is written after every checkpoint. A repeated call reads the checkpoints that it holds, if task,
    seeds and weights are the same.

    Args:
        models: name of each checkpoint and a function that loads it.
        task: name of the task.
        preset: of the observations.
        out: folder of the result.
        episodes: per checkpoint.
        first_seed: seeds count up from it, to 2^32 - 1 at most.
        seed: of the policy's noise.
        max_steps: of an episode; those of the task if None.
        processes: that simulate; one per CPU core if None.
        latency: True measures time and network calls per chunk of the last checkpoint.
        command: to store with the result.

    Returns:
        The record, and the rollouts of the last checkpoint; none if its results were read from the file.
    """
    if not models:
        raise InputError("no model to evaluate: name at least one")
    check_count("episodes", episodes, most=MOST_EPISODES)
    check_episode_seeds("first_seed", first_seed, episodes)
    check_seed("seed", seed)
    about = find_task(task)
    path = make_folder(out) / "evaluation.json"
    seeds = list(range(first_seed, first_seed + episodes))
    protocol: dict[str, Any] = {
        "task": task,
        "observe": preset,
        "score": about.score,
        "max_steps": max_steps or about.max_steps,
        "seeds": seeds,
        "noise_seed": seed,
    }
    total = episodes * int(protocol["max_steps"])  # steps, shown as progress
    known = _known_checkpoints(path, protocol)
    entries: list[dict[str, Any]] = []
    rollouts: list[Rollout] = []
    for index, (name, load) in enumerate(models):
        policy = load()
        key = _identify(name, policy)
        rollouts = []
        if (entry := known.get(key)) is None:
            with track(f"{about.title}, {name}", total, "mean score") as progress:
                began = time.monotonic()
                rollouts = run_rollouts(
                    policy,
                    task,
                    preset,
                    seeds,
                    seed=seed,
                    max_steps=max_steps,
                    processes=processes,
                    on_progress=progress,
                )
                seconds = time.monotonic() - began
            entry = _entry(name, key, about, rollouts, seconds)
            entry |= dict(zip(("horizon", "observed", "executed"), chunk_sizes(policy), strict=True))
            if latency and index == len(models) - 1:  # the same network for all
                shapes = about.observations[preset]
                entry["latency"] = [measure_latency(policy, shapes, batch=n).record() for n in (1, episodes)]
            device = torch.device(getattr(policy, "device", "cpu"))
            entry["environment"] = environment(device)
            entry["simulator"] = simulator_versions(about)
        entries.append(entry)
        record = _record(protocol, entries, about, command)
        with atomic_write(path) as scratch:
            scratch.write_text(_to_json(record))
    return record, rollouts


def _to_json(record: dict[str, Any]) -> str:
    """Return JSON text with each list of numbers on one line."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[^][{}\"]*\]", lambda match: " ".join(match[0].split()), text) + "\n"


def _entry(
    name: str, key: str, about: SimulatedTask, rollouts: Sequence[Rollout], seconds: float
) -> dict[str, Any]:
    scores = [rollout.score for rollout in rollouts]
    summary = summarize([scores])
    entry: dict[str, Any] = {
        "model": name,
        "weights": key,
        "mean": summary.mean,
        "standard_error": summary.standard_error,
        "success_rate": float(np.mean([rollout.success for rollout in rollouts])),
    }
    if about.phases > 1:
        entry["phases"] = _phases(np.array([scores]), about.phases)
    return entry | {
        "scores": scores,
        "successes": [rollout.success for rollout in rollouts],
        "steps": [rollout.steps for rollout in rollouts],
        "seconds": seconds,
    }


def _phases(scores: NDArray[np.float64], phases: int) -> list[float]:
    """Return the share of episodes that completed at least 1, 2, ... parts."""
    return [float((scores >= (k - 1e-9) / phases).mean()) for k in range(1, phases + 1)]


def _record(
    protocol: dict[str, Any], entries: list[dict[str, Any]], about: SimulatedTask, command: str
) -> dict[str, Any]:
    scores = np.array([entry["scores"] for entry in entries])
    summary = summarize(scores)
    successes = np.array([entry["successes"] for entry in entries])
    rate = summarize(successes)
    record: dict[str, Any] = {
        **protocol,
        "mean": summary.mean,
        "standard_error": summary.standard_error,
        "checkpoint_deviation": summary.deviation,
        "success_rate": rate.mean,
        "success_standard_error": rate.standard_error,
    }
    if about.phases > 1:
        record["phases"] = _phases(scores, about.phases)
    return record | {"evaluator": EVALUATOR, "checkpoints": entries, **provenance(command)}


class _KnownLatency(BaseModel):
    """The values of a latency that a summary shows."""

    model_config = ConfigDict(strict=True)

    batch: int
    milliseconds: FiniteFloat
    actions_per_second: FiniteFloat
    network_calls: int | None
    device: str


# The mean and the deviation of larger ones may overflow.
_Score = Annotated[float, Field(ge=-1e100, le=1e100)]


class _Known(BaseModel):
    """The values of a checkpoint's results that are read again; all others are copied as they are."""

    model_config = ConfigDict(strict=True)

    weights: str
    scores: list[_Score]
    successes: list[bool]
    latency: list[_KnownLatency] = []


def _known_checkpoints(path: Path, protocol: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the checkpoints of a file by their weights; none if its protocol differs or it is damaged."""
    try:
        record = read_json(path, "the result of an evaluation", finite=False)
        if any(record.get(key) != value for key, value in protocol.items()):
            return {}
        found = [_Known.model_validate(entry) for entry in record["checkpoints"]]
    except (InputError, ValueError, LookupError, TypeError):  # pydantic's error is a ValueError
        return {}
    episodes = len(protocol["seeds"])
    whole = all(len(entry.scores) == len(entry.successes) == episodes for entry in found)
    entries = zip(found, record["checkpoints"], strict=True)
    return {entry.weights: stored for entry, stored in entries} if whole else {}


def _identify(name: str, policy: Policy) -> str:
    """Return a checksum of the weights and the sampler; the name of a policy without a network."""
    network = getattr(policy, "network", None)
    if not isinstance(network, nn.Module):
        return name
    scheduler = getattr(getattr(policy, "sampler", None), "name", None)  # of diffusion
    sampled = "" if scheduler is None else f"{scheduler}, "
    return f"{weights_checksum(network)[:16]}, {sampled}{getattr(policy, 'calls', None)} calls"


def score_table(records: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Return a Markdown table of evaluations ``(label, record)``: scores, errors and latency."""
    lines = [
        "| policy | task | score | success | checkpoints | seeds | network calls | ms per chunk "
        "| actions/s | on |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label, record in records:
        last = record["checkpoints"][-1]
        single = next((row for row in last.get("latency", []) if row["batch"] == 1), None)
        error = record["standard_error"]
        seeds = record["seeds"]
        cells = [
            label,
            f"{record['task']}, {record['observe']}",
            f"{record['mean']:.3f}" + ("" if error is None else f" ± {error:.3f}"),
            f"{record['success_rate']:.2f}",
            str(len(record["checkpoints"])),
            f"{seeds[0]} to {seeds[-1]}",
        ]
        if single is None:
            cells += ["", "", "", ""]
        else:
            calls = single["network_calls"]
            cells += [
                "" if calls is None else str(calls),
                f"{single['milliseconds']:.1f}",
                f"{single['actions_per_second']:,.0f}",
                single["device"],
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
