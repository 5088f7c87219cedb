"""A scripted expert of Lift: approach from above, turn to the cube, grasp, lift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["LiftExpert"]

Array = NDArray[np.float64]
METERS, RADIANS = 0.05, 0.5  # change of the gripper's pose that an action of 1 asks for
STIFFNESS = 3.0  # the arm covers about a third of the change that an action asks for
OPEN, CLOSE = -1.0, 1.0


class LiftExpert:
    """Chooses actions from the poses of gripper and cube; every episode has a style of its own.

    The style draws the height of the approach, a detour on the way, speeds, the face of the cube that is
    grasped, the offset of the grasp and the duration of closing. The expert corrects every disturbance: it
    goes back to an earlier phase if the gripper is no longer above the cube or the cube was lost.

    Args:
        random: generator of the style.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self.height = random.uniform(0.05, 0.12)  # above the cube, before the descent
        self.detour = np.append(random.normal(0, 0.04, 2), random.uniform(0.0, 0.05))
        self.gain = random.uniform(0.55, 1.0)
        self.slow = random.uniform(0.35, 0.8)  # speed of the descent
        self.turn = random.uniform(0.6, 1.0)
        self.offset = np.append(random.uniform(-0.006, 0.006, 2), random.uniform(-0.008, 0.004))
        self.closing = int(random.integers(6, 12))  # steps of closing before the lift
        self.other_face = bool(random.random() < 0.25)
        self.via_detour = bool(random.random() < 0.6)
        self.closed = 0
        self.yaw_shift: float | None = None

    def act(self, raw: Mapping[str, NDArray[Any]]) -> Array:
        """Return the action ``[7]`` for an observation under robosuite's names."""
        gripper = np.asarray(raw["robot0_eef_pos"], np.float64)
        cube = np.asarray(raw["cube_pos"], np.float64)
        turn = self._turn(raw["robot0_eef_quat"], raw["cube_quat"])
        away = gripper - (cube + self.offset)
        apart = float(np.linalg.norm(away[:2]))
        if self.closed:
            if apart > 0.035 or abs(away[2]) > 0.035:  # the cube slipped out: begin again
                self.closed = 0
            elif self.closed < self.closing:
                self.closed += 1
                return _action(np.zeros(3), 0.0, CLOSE)
            else:
                return _action(np.array([0.0, 0.0, self.gain]), 0.0, CLOSE)
        above = cube + self.offset + [0.0, 0.0, self.height]
        if self.via_detour:
            target = above + self.detour
            if np.linalg.norm(target - gripper) < 0.03:
                self.via_detour = False
            return _action(self._towards(target, gripper, self.gain), self.turn * turn, OPEN)
        if apart > 0.018 + 0.3 * max(away[2], 0.0) or (abs(turn) > 0.15 and away[2] > 0.03):
            # Beside the cube and low: rise first, so that the fingers do not push it.
            target = above if away[2] > 0.03 else np.append(gripper[:2], above[2])
            return _action(self._towards(target, gripper, self.gain), self.turn * turn, OPEN)
        if away[2] > 0.008:
            target = cube + self.offset
            return _action(self._towards(target, gripper, self.slow), self.turn * turn, OPEN)
        self.closed = 1
        return _action(np.zeros(3), 0.0, CLOSE)

    def _towards(self, target: Array, gripper: Array, speed: float) -> Array:
        step = STIFFNESS * (target - gripper) / METERS
        size = float(np.linalg.norm(step))
        return step * min(1.0, speed / max(size, 1e-9))

    def _turn(self, gripper: NDArray[Any], cube: NDArray[Any]) -> float:
        """Return the angle about the vertical axis that aligns the fingers with a face of the cube."""
        fingers = _rotation(gripper)[:, 1]  # the fingers move along this axis
        side = _rotation(cube)[:, 0]
        angle = np.arctan2(side[1], side[0]) - np.arctan2(fingers[1], fingers[0])
        nearest = (angle + np.pi / 4) % (np.pi / 2) - np.pi / 4
        if self.yaw_shift is None:  # decided once: the two faces must not alternate
            far = nearest - np.copysign(np.pi / 2, nearest)
            self.yaw_shift = far - nearest if self.other_face and abs(far) < 1.2 else 0.0
        if self.yaw_shift == 0.0:
            return float(nearest)
        # Fingers are symmetric, so angles repeat every half turn; follow the face chosen at first.
        turn = (angle + np.pi / 2) % np.pi - np.pi / 2
        return float(turn if abs(turn) < 1.3 else nearest)


def _action(motion: Array, turn: float, fingers: float) -> Array:
    action = np.zeros(7)
    action[:3], action[5], action[6] = motion, STIFFNESS / 2 * turn / RADIANS, fingers
    return np.clip(action, -1.0, 1.0)


def _rotation(quaternion: NDArray[Any]) -> Array:
    """Return the rotation matrix of a quaternion x, y, z, w."""
    x, y, z, w = np.asarray(quaternion, np.float64) / np.linalg.norm(quaternion)
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )
