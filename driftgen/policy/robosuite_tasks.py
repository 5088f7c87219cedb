"""Lift and PickPlaceCan of robosuite, with the observations of robomimic's data sets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from driftgen.policy.environments import find_task, quiet
from driftgen.policy.observation_keys import ROBOMIMIC, observe

with quiet():
    import robosuite
    from robosuite.controllers import load_composite_controller_config

__all__ = ["CAMERAS", "RobosuiteTask", "make"]

NAMES = {"lift": "Lift", "can": "PickPlaceCan"}
CAMERAS = ("agentview", "robot0_eye_in_hand")
CAMERA_SIZE = 84
# A frame is cut out of a larger picture, which has much wall and floor: this share of it is above the frame.
FRAME, SCENE, LOWER = 384, 640, 12


class RobosuiteTask(gymnasium.Env):
    """A task of a Panda arm: a change of the gripper's pose and its opening, 20 times a second.

    An action has 7 values from -1 to 1: position, rotation (axis and angle), gripper (1 closes). The score is
    1 from the step on in which the object is lifted (Lift) or in its bin (Can).

    Args:
        name: ``lift`` or ``can``.
        preset: ``state`` (object, gripper pose and opening) or ``image`` (two cameras, gripper).
        frames: True if :meth:`render` is called.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012, gymnasium's attribute
    render_mode = "rgb_array"

    def __init__(self, name: str, preset: str = "state", frames: bool = False) -> None:
        self.name, self.preset = name, preset
        cameras = preset == "image"
        with quiet():
            self.simulator: Any = robosuite.make(
                NAMES[name],
                robots="Panda",
                controller_configs=load_composite_controller_config(robot="Panda"),
                has_renderer=False,
                has_offscreen_renderer=cameras or frames,
                use_camera_obs=cameras,
                camera_names=list(CAMERAS),
                camera_heights=CAMERA_SIZE,
                camera_widths=CAMERA_SIZE,
                use_object_obs=True,
                control_freq=20,
                ignore_done=True,
                hard_reset=True,  # the cube's size is drawn when the model is built
            )
        self.action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)
        entries: dict[str, spaces.Space[Any]] = {}
        for key, shape in find_task(name).observations[preset].items():
            camera = len(shape) == 3
            low, high = (0, 255) if camera else (-np.inf, np.inf)
            entries[key] = spaces.Box(low, high, shape, np.uint8 if camera else np.float32)
        self.observation_space = spaces.Dict(entries)
        self.raw: dict[str, NDArray[Any]] = {}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Build the scene anew. The seed fixes the object's size, pose and the arm's joint angles."""
        super().reset(seed=seed)
        with quiet(), _seeded(self.simulator, seed):
            self.raw = _robomimic_names(self.simulator.reset())
        return self._observation(), {"score": 0.0, "success": False}

    def step(self, action: ArrayLike) -> tuple[dict[str, NDArray[Any]], float, bool, bool, dict[str, Any]]:
        """Apply an action for a twentieth of a second."""
        raw, _, _, _ = self.simulator.step(np.asarray(action, np.float64))
        self.raw = _robomimic_names(raw)
        success = bool(self.simulator._check_success())
        score = float(success)
        return self._observation(), score, success, False, {"score": score, "success": success}

    def render(self) -> NDArray[np.uint8]:
        """Return the part of the front camera's picture with the arm and the table."""
        picture = self.simulator.sim.render(camera_name="frontview", width=SCENE, height=SCENE)[::-1]
        top, left = LOWER * SCENE // 100, (SCENE - FRAME) // 2
        return np.ascontiguousarray(picture[top : top + FRAME, left : left + FRAME])

    def close(self) -> None:
        """Close the simulator."""
        self.simulator.close()

    def _observation(self) -> dict[str, NDArray[Any]]:
        # The same concatenation as for a file, of one step.
        batch = observe(ROBOMIMIC[self.preset], lambda key: self.raw[key][None], self.name)
        return {key: array[0] for key, array in batch.items()}


def _robomimic_names(raw: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Rename the object's state and turn images upright, as robomimic's files have them."""
    arrays = {"object" if key == "object-state" else key: np.asarray(array) for key, array in raw.items()}
    return {key: a[::-1] if key.endswith("_image") else a for key, a in arrays.items()}


@contextlib.contextmanager
def _seeded(simulator: Any, seed: int | None) -> Iterator[None]:
    """Seed the generators that robosuite draws from, and restore the state of NumPy's global one.

    robosuite draws from the global generator up to 1.5.1, from ``rng`` of the simulator from 1.5.2 on.
    """
    if seed is None:
        yield
        return
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed % 2**32)  # noqa: NPY002
    if hasattr(simulator, "rng"):  # in place: parts of the scene hold the same generator
        simulator.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
    try:
        yield
    finally:
        np.random.set_state(state)  # noqa: NPY002


def make(name: str, observe: str, frames: bool) -> RobosuiteTask:
    """Build the environment; see :func:`driftgen.policy.environments.make_environment`."""
    return RobosuiteTask(name, observe, frames)
