"""PushT: push a T-shaped block onto its target, in the simulator of ``gym-pusht``."""

from __future__ import annotations

import os
from typing import Any

# Before gym_pusht imports pygame: draw without a display, print no greeting.
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")

import gym_pusht  # noqa: F401, registers the environment
import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from driftgen.policy.episodes import IMAGE, STATE

__all__ = ["PushT", "initial_pose", "keypoints", "make"]

# The points of the block in Diffusion Policy's data, in the frame of the block, to 5 decimals.
BLOCK_POINTS = np.array(
    [
        *([9.26979, 90.04097], [-60.98347, -1.18673], [60.91276, -1.39336]),
        *([-0.27050, 25.54363], [-14.06493, 122.81585], [39.00274, 32.85740]),
        *([-39.96641, 32.72966], [-16.82434, 62.86318], [23.54146, -1.70029]),
    ]
)
FRAME = 384  # side of a rendered frame
COVERED = 0.95  # share of the target that counts as success


class PushT(gymnasium.Env):
    """PushT with the observations, initial states and score of Diffusion Policy.

    An action is the target position of the agent, in pixels of a 512 x 512 window. The score is the share of
    the target that the block covers, divided by 0.95 and at most 1.

    Args:
        observe: ``keypoints`` (9 points of the block and the agent, 20 values), ``pose`` (agent, block and
            angle, 5 values) or ``image`` (96 x 96 pixels and the agent).
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012, gymnasium's attribute
    render_mode = "rgb_array"

    def __init__(self, observe: str = "keypoints") -> None:
        self.observe = observe
        self.simulator: Any = gymnasium.make(
            "gym_pusht/PushT-v0",
            obs_type="pixels" if observe == "image" else "state",
            visualization_width=FRAME,
            visualization_height=FRAME,
            disable_env_checker=True,
        ).unwrapped
        self.action_space = spaces.Box(0.0, 512.0, (2,), np.float32)
        size = {"keypoints": 20, "pose": 5, "image": 2}[observe]
        entries: dict[str, spaces.Space[Any]] = {STATE: spaces.Box(-np.inf, np.inf, (size,), np.float32)}
        if observe == "image":
            entries[IMAGE] = spaces.Box(0, 255, (96, 96, 3), np.uint8)
        self.observation_space = spaces.Dict(entries)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Start an episode in the state that Diffusion Policy draws for the seed.

        ``options={"pose": [agent x, agent y, block x, block y, angle]}`` starts from a recorded state.
        """
        super().reset(seed=seed)
        pose = None if options is None else options.get("pose")
        if pose is None:
            self.simulator.reset(options={"reset_to_state": initial_pose(seed)})
        else:
            self._place(np.asarray(pose, np.float64))
        self.simulator._last_action = None
        return self._observation(), {"score": 0.0, "success": False}

    def step(self, action: ArrayLike) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Move the agent towards the action for a tenth of a second."""
        info = self.simulator.step(np.asarray(action, np.float64))[4]
        # The area is summed over a set of shapes, whose order and last digit differ between processes.
        coverage = round(float(info["coverage"]), 9)
        score, success = min(coverage / COVERED, 1.0), coverage > COVERED
        facts = {"score": score, "success": success, "coverage": coverage}
        return self._observation(), score, success, False, facts

    def render(self) -> NDArray[np.uint8]:
        """Return a frame with the last action as a cross."""
        return np.asarray(self.simulator.render(), np.uint8)

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    @property
    def pose(self) -> NDArray[np.float64]:
        """Position of the agent, position and angle of the block: ``[5]``."""
        agent, block = self.simulator.agent, self.simulator.block
        return np.array([*agent.position, *block.position, block.angle % (2 * np.pi)])

    def _place(self, pose: NDArray[np.float64]) -> None:
        """Set a state exactly, in a space without the contacts of an earlier one.

        The simulator's own reset turns the block after it is placed, which moves it, and steps the physics.
        """
        self.simulator._setup()
        agent, block = self.simulator.agent, self.simulator.block
        agent.position, block.angle = pose[:2].tolist(), float(pose[4])
        block.position = pose[2:4].tolist()
        for body in (agent, block):
            self.simulator.space.reindex_shapes_for_body(body)

    def _observation(self) -> dict[str, NDArray[Any]]:
        pose = self.pose
        if self.observe == "pose":
            return {STATE: pose.astype(np.float32)}
        if self.observe == "keypoints":
            return {STATE: np.concatenate([keypoints(pose).reshape(-1), pose[:2]]).astype(np.float32)}
        return {STATE: pose[:2].astype(np.float32), IMAGE: np.asarray(self.simulator.get_obs(), np.uint8)}


def keypoints(pose: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the 9 points of the block ``[9, 2]`` for a pose ``[5]``."""
    cosine, sine = np.cos(pose[4]), np.sin(pose[4])
    return np.asarray(BLOCK_POINTS @ np.array([[cosine, sine], [-sine, cosine]]) + pose[2:4])


def initial_pose(seed: int | None) -> NDArray[np.float64]:
    """Return the initial state of a seed, drawn as Diffusion Policy draws it."""
    random = np.random.RandomState(seed)
    agent = [random.randint(50, 450), random.randint(50, 450)]
    block = [random.randint(100, 400), random.randint(100, 400)]
    return np.array([*agent, *block, random.randn() * 2 * np.pi - np.pi], np.float64)


def make(name: str, observe: str, frames: bool) -> PushT:
    """Build the environment; see :func:`driftgen.policy.environments.make_environment`."""
    return PushT(observe)
