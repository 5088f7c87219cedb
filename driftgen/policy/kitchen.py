"""Franka Kitchen of gymnasium-robotics, with the 60 values that the Relay Kitchen data observes."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from driftgen.policy.environments import quiet
from driftgen.policy.episodes import STATE

with quiet():
    import gymnasium_robotics

__all__ = ["Kitchen", "make"]

PARTS = (
    "bottom burner",
    "top burner",
    "light switch",
    "slide cabinet",
    "hinge cabinet",
    "microwave",
    "kettle",
)
WANTED = 4  # parts of an episode: any four of the seven


class Kitchen(gymnasium.Env):
    """``FrankaKitchen-v1``: any four of seven parts, such as opening the microwave.

    The observation has 9 joint positions of the arm and 21 of the kitchen, followed by 30 zeros in place of
    the goal, which the data sets do not use. An action has 9 joint velocities from -1 to 1. The score is the
    number of completed parts over 4.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012, gymnasium's attribute
    render_mode = "rgb_array"

    def __init__(self, frames: bool = False) -> None:
        gymnasium.register_envs(gymnasium_robotics)
        self.simulator: Any = gymnasium.make(
            "FrankaKitchen-v1",
            tasks_to_complete=list(PARTS),
            max_episode_steps=None,
            render_mode="rgb_array" if frames else None,
            disable_env_checker=True,
        ).unwrapped
        self.action_space = spaces.Box(-1.0, 1.0, (9,), np.float32)
        self.observation_space = spaces.Dict({STATE: spaces.Box(-np.inf, np.inf, (60,), np.float32)})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start an episode; the seed fixes the noise of the observations."""
        super().reset(seed=seed)
        raw, _ = self.simulator.reset(seed=seed)
        return _observation(raw), {"score": 0.0, "success": False}

    def step(self, action: ArrayLike) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Apply joint velocities."""
        raw, _, _, _, info = self.simulator.step(np.clip(np.asarray(action, np.float64), -1, 1))
        done = len(info["episode_task_completions"])
        score, success = min(done / WANTED, 1.0), done >= WANTED
        return _observation(raw), score, success, False, {"score": score, "success": success}

    def render(self) -> NDArray[np.uint8]:
        """Return a frame."""
        return np.asarray(self.simulator.render(), np.uint8)

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()


def _observation(raw: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    # 9 positions and 9 velocities of the arm, then 21 positions and 20 velocities of the kitchen.
    values = raw["observation"]
    positions = np.concatenate([values[:9], values[18:39], np.zeros(30)])
    return {STATE: positions.astype(np.float32)}


def make(name: str, observe: str, frames: bool) -> Kitchen:
    """Build the environment; see :func:`driftgen.policy.environments.make_environment`."""
    return Kitchen(frames)
