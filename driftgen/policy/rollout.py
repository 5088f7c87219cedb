"""Rollouts: a policy acts in simulated episodes, with a receding horizon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.policy.environments import find_task
from driftgen.policy.simulation import Simulation, Status, check_episode_seeds, choose_processes
from driftgen.support.rng import derive_generator, derive_seed
from driftgen.support.whole_numbers import check_seed

__all__ = ["Policy", "RandomPolicy", "Rollout", "chunk_sizes", "run_rollouts"]

HORIZON, OBSERVED, EXECUTED = 16, 2, 8  # of Diffusion Policy


class Policy(Protocol):
    """Predicts chunks of actions, in the units of the environment.

    Optional attributes ``horizon``, ``observed`` and ``executed`` give the sizes of a chunk; 16, 2 and 8 if
    missing.
    """

    def reset(self) -> None:
        """Forget the last episode."""
        ...

    def predict(self, observations: Mapping[str, Any], noise: Any = None, seed: int | None = None) -> Any:
        """Return actions ``[B, horizon, A]`` for histories ``[B, observed, ...]`` by key.

        The action of the latest observation is at index ``observed - 1``.
        """
        ...


@dataclass(frozen=True, eq=False)
class Rollout:
    """One simulated episode.

    Attributes:
        seed: of the environment.
        score: best score of the episode.
        success: True if the task was solved.
        actions: executed actions ``[steps, A]``; the environment repeats the episode from them.
        scores: score after each step.
    """

    seed: int
    score: float
    success: bool
    actions: NDArray[np.float64]
    scores: NDArray[np.float64]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.scores)


class RandomPolicy:
    """Uniformly random actions: the floor of every score.

    Args:
        task: name of the task, for the range of its actions.
        horizon: actions of a chunk.
    """

    observed, executed, calls = OBSERVED, EXECUTED, 0

    def __init__(self, task: str, horizon: int = HORIZON) -> None:
        low, high = find_task(task).action_range
        self.low, self.high, self.horizon = np.array(low), np.array(high), horizon

    def reset(self) -> None:
        """Do nothing: the policy has no memory."""

    def sample_noise(self, n: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Return uniform noise ``[n, horizon, A]``."""
        return torch.rand(n, self.horizon, len(self.low), generator=generator)

    def predict(self, observations: Mapping[str, Any], noise: Any = None, seed: int | None = None) -> Any:
        """Return actions between the lowest and the highest one."""
        if noise is None:
            rows = len(next(iter(observations.values())))
            noise = self.sample_noise(rows, None if seed is None else torch.Generator().manual_seed(seed))
        return self.low + (self.high - self.low) * np.asarray(noise, np.float64)


def chunk_sizes(policy: Policy) -> tuple[int, int, int]:
    """Return horizon, observed and executed steps of a policy; those of Diffusion Policy if it has none."""
    horizon, observed, executed = (
        int(getattr(policy, name, default))
        for name, default in (("horizon", HORIZON), ("observed", OBSERVED), ("executed", EXECUTED))
    )
    return horizon, observed, executed


def run_rollouts(
    policy: Policy,
    task: str,
    preset: str,
    seeds: Sequence[int],
    *,
    seed: int = 0,
    max_steps: int | None = None,
    processes: int | None = None,
    batch: int = 50,
    on_progress: Callable[[int, float], None] | None = None,
) -> list[Rollout]:
    """Simulate one episode per seed.

    All running episodes are predicted in one batch. The noise of a chunk depends on ``seed``, the episode's
    seed and the chunk's number alone, so an episode does not depend on those beside it, up to the rounding
    of a network that computes in batches.

    Args:
        policy: the policy.
        task: name of the task.
        preset: observations of the policy.
        seeds: of the environment, one per episode, from 0 to 2^32 - 1.
        seed: of the noise.
        max_steps: of an episode; those of the task if None.
        processes: that simulate; one per CPU core if None.
        batch: episodes at a time.
        on_progress: called with the number of steps, out of ``max_steps`` per episode, and the mean of the
            best scores so far; finished episodes count as a whole.
    """
    if not seeds:
        raise InputError("seeds are empty: simulate at least one episode")
    for number in seeds:
        check_episode_seeds("seed of an episode", number)
    check_seed("seed", seed)
    _, observed, executed = chunk_sizes(policy)
    processes = choose_processes(processes, min(len(seeds), batch))
    rollouts: list[Rollout] = []

    limit = find_task(task).max_steps if max_steps is None else max_steps

    def report(records: Sequence[_Record], statuses: Mapping[int, Status]) -> None:
        if on_progress is not None:
            best = [rollout.score for rollout in rollouts] + [max(record.scores) for record in records]
            steps = [limit if statuses[i].done else len(record.scores) for i, record in enumerate(records)]
            on_progress(limit * len(rollouts) + sum(steps), float(np.mean(best)))

    with Simulation(task, preset, observed=observed, max_steps=max_steps, processes=processes) as simulation:
        for first in range(0, len(seeds), batch):
            part = seeds[first : first + batch]
            policy.reset()
            statuses = simulation.reset(part)
            records = [_Record(s) for s in part]
            chunk = 0
            while active := [slot for slot, status in statuses.items() if not status.done]:
                noise_seeds = [derive_seed(seed, part[slot], chunk) for slot in active]
                actions = _predict(policy, [statuses[slot] for slot in active], noise_seeds)
                actions = actions[:, observed - 1 : observed - 1 + executed]
                advanced = simulation.advance(dict(zip(active, actions, strict=True)))
                for slot, row in zip(active, actions, strict=True):
                    records[slot].add(row, advanced[slot])
                statuses |= advanced
                chunk += 1
                report(records, statuses)
            rollouts += [record.finish() for record in records]
    return rollouts


class _Record:
    """Actions and scores of an episode in progress."""

    def __init__(self, seed: int) -> None:
        self.seed, self.success = seed, False
        self.actions: list[NDArray[np.float64]] = []
        self.scores: list[float] = []

    def add(self, chunk: NDArray[np.float64], status: Status) -> None:
        self.actions.append(chunk[: len(status.scores)])
        self.scores += status.scores
        self.success = status.success

    def finish(self) -> Rollout:
        scores = np.array(self.scores)
        return Rollout(self.seed, float(scores.max()), self.success, np.concatenate(self.actions), scores)


def _predict(policy: Policy, statuses: Sequence[Status], seeds: Sequence[int]) -> NDArray[np.float64]:
    """Return chunks ``[B, horizon, A]``; the noise of each row has a seed of its own."""
    keys = statuses[0].history
    observations = {key: np.stack([status.history[key] for status in statuses]) for key in keys}
    parts: tuple[Any, ...] = (policy, getattr(policy, "network", None))
    sampler = next((part for part in parts if hasattr(part, "sample_noise")), None)
    if sampler is None:
        chunks = policy.predict(observations, seed=derive_seed(*seeds))
    else:
        rows = [sampler.sample_noise(1, derive_generator(number)) for number in seeds]
        chunks = policy.predict(observations, noise=torch.cat(rows))
    if isinstance(chunks, torch.Tensor):
        chunks = chunks.detach().cpu().numpy()
    actions = np.asarray(chunks, np.float64)
    if not np.isfinite(actions).all():
        raise InputError("the policy predicts actions that are not finite: check the training run's report")
    return actions
