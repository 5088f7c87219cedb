"""Demonstrations in memory: episodes of observations and actions, and windows over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from driftgen.errors import InputError

__all__ = ["IMAGE", "STATE", "Episodes", "Windows"]

# Keys of LeRobot: a vector, one camera, and several cameras as observation.images.NAME.
STATE, IMAGE = "observation.state", "observation.image"


@dataclass(frozen=True, eq=False)
class Episodes:
    """Episodes one after the other.

    Attributes:
        observations: arrays by key: ``observation.state`` ``[steps, S]`` in float32, ``observation.image`` or
            ``observation.images.NAME`` ``[steps, H, W, 3]`` in uint8.
        actions: ``[steps, A]`` in float32.
        ends: index after the last step of each episode, ``[episodes]``, increasing.
        source: file or environment that the episodes come from, named in messages.
    """

    observations: dict[str, NDArray[Any]]
    actions: NDArray[Any]
    ends: NDArray[Any]
    source: str = "episodes"

    def __post_init__(self) -> None:
        self._set("actions", self._floats("actions", self.actions))
        self._set("ends", self._checked_ends(np.asarray(self.ends)))
        self._set("observations", {key: self._checked(key, a) for key, a in self.observations.items()})
        if not self.observations:
            raise InputError(f"{self.source} holds no observations: store {STATE}, {IMAGE} or both")

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def steps(self) -> int:
        """Number of steps of all episodes."""
        return len(self.actions)

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index of the first step of each episode."""
        return np.concatenate([np.zeros(1, np.int64), self.ends[:-1]])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of steps of each episode."""
        return np.asarray(self.ends - self.starts)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of one observation, by key."""
        return {key: array.shape[1:] for key, array in self.observations.items()}

    def __iter__(self) -> Iterator[Episodes]:
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            parts = {key: array[start:end] for key, array in self.observations.items()}
            yield Episodes(parts, self.actions[start:end], np.array([end - start]), self.source)

    def select(self, indices: Sequence[int] | NDArray[Any]) -> Episodes:
        """Return some of the episodes, in the given order."""
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        if not len(chosen) or chosen.min() < 0 or chosen.max() >= len(self):
            raise InputError(
                f"{self.source}: episodes {chosen.tolist()[:8]} are asked for, there are 0 to {len(self) - 1}"
            )
        steps = np.concatenate([np.arange(self.starts[i], self.ends[i]) for i in chosen])
        parts = {key: array[steps] for key, array in self.observations.items()}
        return Episodes(parts, self.actions[steps], np.cumsum(self.lengths[chosen]), self.source)

    def split(self, fraction: float, seed: int = 0) -> tuple[Episodes, Episodes | None]:
        """Return training episodes and a random share of at least one held-out episode.

        ``fraction`` 0 holds out none: the second part is then None.
        """
        if not 0 <= fraction < 1:
            raise InputError(f"fraction={fraction!r}: the share of held-out episodes is from 0 to below 1")
        if fraction == 0:
            return self, None
        if len(self) < 2:
            raise InputError(
                f"{self.source} holds 1 episode: no episode can be held out: use "
                "--set data.validation=0, or fraction=0 in Python"
            )
        count = min(max(1, round(len(self) * fraction)), len(self) - 1)
        held_out = np.zeros(len(self), bool)
        held_out[np.random.default_rng(seed).choice(len(self), count, replace=False)] = True
        return self.select(np.flatnonzero(~held_out)), self.select(np.flatnonzero(held_out))

    def check_actions(self, low: ArrayLike, high: ArrayLike, name: str) -> Episodes:
        """Return the episodes; raise if an action lies outside of the range of the environment ``name``."""
        low, high = (np.asarray(bound, np.float64).reshape(-1) for bound in (low, high))
        if self.actions.shape[1] != len(low):
            raise InputError(
                f"{self.source}: an action has {self.actions.shape[1]} values, {name} takes {len(low)}: "
                "choose the environment that the data was recorded in"
            )
        slack = 1e-4 * (high - low)  # float32 rounding
        wrong = (self.actions < low - slack) | (self.actions > high + slack)
        if wrong.any():
            step, dim = (int(i) for i in np.argwhere(wrong)[0])
            raise InputError(
                f"{self.source}: action {dim} of step {step} is {self.actions[step, dim]:g}, {name} takes "
                f"{low[dim]:g} to {high[dim]:g}: convert the actions or choose another environment"
            )
        return self

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _checked_ends(self, ends: NDArray[Any]) -> NDArray[np.int64]:
        if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends):
            raise InputError(
                f"{self.source}: episode ends have shape {list(ends.shape)} and dtype {ends.dtype}, expected "
                "one integer per episode"
            )
        ends = ends.astype(np.int64)
        wrong = np.flatnonzero(np.diff(ends, prepend=0) <= 0)
        if len(wrong):
            i = int(wrong[0])
            before = f"the end before it is {ends[i - 1]}" if i else "an episode has at least one step"
            raise InputError(
                f"{self.source}: the end of episode {i} is {ends[i]}, {before}: episode ends must increase"
            )
        if ends[-1] != len(self.actions):
            raise InputError(
                f"{self.source}: the last episode ends at step {ends[-1]}, but there are {len(self.actions)} "
                "actions: store one end per episode, counted over all episodes"
            )
        return ends

    def _checked(self, key: str, array: NDArray[Any]) -> NDArray[Any]:
        if key not in (STATE, IMAGE) and not key.startswith("observation."):
            raise InputError(
                f"{self.source}: observation {key!r} is not known: name it {STATE}, {IMAGE} or "
                "observation.images.NAME"
            )
        array = np.asarray(array)
        if len(array) != len(self.actions):
            raise InputError(
                f"{self.source}: {key} has {len(array)} steps, actions have {len(self.actions)}: store one "
                "observation per action"
            )
        if not key.startswith(IMAGE):  # also observation.images.NAME
            return self._floats(key, array)
        if array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8:
            raise InputError(
                f"{self.source}: {key} has shape {list(array.shape)} and dtype {array.dtype}, expected uint8 "
                "[steps, height, width, 3]"
            )
        return array

    def _floats(self, key: str, array: ArrayLike) -> NDArray[np.float32]:
        values = np.asarray(array)
        if values.ndim != 2 or not values.shape[1] or values.dtype.kind not in "iuf":
            raise InputError(
                f"{self.source}: {key} has shape {list(values.shape)} and dtype {values.dtype}, expected "
                "numbers [steps, dimensions]"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below
            floats = np.ascontiguousarray(values, np.float32)
        finite = np.isfinite(floats).all(axis=1)
        if not finite.all():
            step = int(np.flatnonzero(~finite)[0])
            raise InputError(f"{self.source}: {key} of step {step} is not finite: remove that episode")
        return floats


class Windows:
    """Windows of ``horizon`` steps: the first ``observed`` observations and all actions.

    Windows overlap and begin at every step. They reach over both ends of an episode, as in Diffusion Policy:
    by ``observed - 1`` steps before it and ``executed - 1`` steps after it, filled with its first and its
    last step. A window does not reach into another episode.

    Args:
        episodes: demonstrations.
        horizon: number of actions of a window.
        observed: number of observations of a window; the last one is the present.
        executed: number of actions that a policy executes before it predicts again.
    """

    def __init__(self, episodes: Episodes, horizon: int = 16, observed: int = 2, executed: int = 8) -> None:
        if not (1 <= observed <= horizon and 1 <= executed <= horizon - observed + 1):
            raise InputError(
                f"horizon={horizon}, observed={observed}, executed={executed} do not fit together: a chunk "
                f"executes at most horizon - observed + 1 = {horizon - observed + 1} actions"
            )
        self.episodes = episodes
        self.horizon, self.observed, self.executed = horizon, observed, executed
        counts = np.maximum(episodes.lengths - horizon + executed - 1 + observed - 1 + 1, 0)
        if not counts.any():
            raise InputError(
                f"{episodes.source}: the longest episode has {episodes.lengths.max()} steps, too few for "
                f"windows of {horizon}: choose a smaller horizon"
            )
        # Offset of each window within its episode: -(observed - 1), ..., length - horizon + executed - 1.
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) - (observed - 1)
        self._first = np.repeat(episodes.starts, counts)
        self._last = np.repeat(episodes.ends - 1, counts)
        self._start = self._first + offsets

    def __len__(self) -> int:
        return len(self._start)

    def episode_of(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the episode of each window."""
        chosen = self._first[np.asarray(indices)]
        return np.asarray(np.searchsorted(self.episodes.ends, chosen, side="right"), np.int64)

    def steps(self, indices: ArrayLike, count: int | None = None) -> NDArray[np.int64]:
        """Return the step of each of the first ``count`` entries of the windows, ``[B, count]``."""
        chosen = np.asarray(indices, np.int64).reshape(-1)
        if len(chosen) and (chosen.min() < -len(self) or chosen.max() >= len(self)):
            raise IndexError(f"windows are numbered 0 to {len(self) - 1}")
        time = np.arange(self.horizon if count is None else count)
        first, last = self._first[chosen, None], self._last[chosen, None]
        return np.asarray(np.clip(self._start[chosen, None] + time, first, last), np.int64)

    def load(self, indices: ArrayLike) -> tuple[dict[str, NDArray[Any]], NDArray[np.float32]]:
        """Return the observations ``[B, observed, ...]`` by key and the actions ``[B, horizon, A]``."""
        seen = self.steps(indices, self.observed)
        observations = {key: array[seen] for key, array in self.episodes.observations.items()}
        return observations, self.episodes.actions[self.steps(indices)]
