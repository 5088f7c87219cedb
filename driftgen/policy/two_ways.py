"""Two ways: a 2-D navigation toy with two equally good ways around an obstacle.

A point starts on the left, a goal lies on the right, and a disk blocks the straight line. Half of the
demonstrations pass above the disk, half below. A policy that averages them drives into the disk.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from driftgen.policy.episodes import STATE, Episodes

__all__ = ["Result", "demonstrate", "navigate"]

START, GOAL = np.array([-1.0, 0.0]), np.array([1.0, 0.0])
JITTER = 0.01  # standard deviation of the start
RADIUS = 0.35  # of the disk around the origin
DETOUR = 0.7  # height of a demonstration over the disk
STEPS = 16  # of a demonstration
REACH = 0.15  # distance at which the goal is reached
SPEED = 0.3  # longest step
LONGEST = 32  # steps of a rollout
Array = NDArray[Any]


class Predicts(Protocol):
    """A policy; see :class:`~driftgen.policy.drifting_policy.DriftingPolicy`."""

    observed: int
    executed: int

    def predict(self, observations: Any, noise: Any = None, seed: int | None = None) -> Array: ...


class Result(NamedTuple):
    """Outcome of rollouts, ``[n]`` each.

    Attributes:
        success: the goal was reached without touching the disk.
        above: the point passed above the disk, or touched its upper half.
        paths: positions ``[n, steps, 2]``.
    """

    success: Array
    above: Array
    paths: Array


def demonstrate(episodes: int = 100, noise: float = 0.01, seed: int = 0) -> Episodes:
    """Return demonstrations: the state is the position ``[2]``, the action the next position ``[2]``."""
    random = np.random.default_rng(seed)
    states, actions = [], []
    for i in range(episodes):
        start = START + random.normal(0, JITTER, 2)
        height = (1 if i % 2 else -1) * (DETOUR + random.normal(0, 0.03))
        time = np.linspace(0, 1, STEPS + 1)[:, None]
        path = start + time * (GOAL - start)
        path[:, 1] += height * np.sin(np.pi * time[:, 0])
        path[1:-1] += random.normal(0, noise, path[1:-1].shape)
        states.append(path[:-1])
        actions.append(path[1:])
    ends = np.cumsum([len(part) for part in states])
    return Episodes({STATE: np.concatenate(states)}, np.concatenate(actions), ends, "two ways")


def navigate(policy: Predicts, rollouts: int = 64, seed: int = 0) -> Result:
    """Roll out a policy from random starts, all at once; chunks are executed with a receding horizon."""
    random = np.random.default_rng((seed, 1))
    position = START + random.normal(0, JITTER, (rollouts, 2))
    history = [position] * policy.observed
    touched, reached = np.zeros(rollouts, bool), np.zeros(rollouts, bool)
    highest = np.zeros((rollouts, 2))  # extremes of y while beside the disk
    paths, call = [position], 0
    while len(paths) <= LONGEST:
        observed = np.stack(history[-policy.observed :], axis=1).astype(np.float32)
        chunk = policy.predict({STATE: observed}, seed=seed + 1000 * call)
        call += 1
        for action in chunk[:, policy.observed - 1 :][:, : policy.executed].transpose(1, 0, 2):
            move = action - position
            length = np.linalg.norm(move, axis=1, keepdims=True)
            free = (~touched & ~reached)[:, None]
            position = np.where(
                free, position + move * np.minimum(1, SPEED / np.maximum(length, 1e-9)), position
            )
            touched |= np.linalg.norm(position, axis=1) < RADIUS
            reached |= ~touched & (np.linalg.norm(position - GOAL, axis=1) < REACH)
            beside = np.abs(position[:, 0]) < RADIUS
            highest[:, 0] = np.where(beside, np.maximum(highest[:, 0], position[:, 1]), highest[:, 0])
            highest[:, 1] = np.where(beside, np.minimum(highest[:, 1], position[:, 1]), highest[:, 1])
            history.append(position)
            paths.append(position)
    return Result(reached, highest[:, 0] > -highest[:, 1], np.stack(paths, axis=1))
