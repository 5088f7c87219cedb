"""Objects of an observation in the plane, drawn behind chunks: an obstacle, a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.policy.two_ways import RADIUS

__all__ = ["draw_scene"]

Array = NDArray[Any]
KEYPOINTS = 9  # of the block of PushT, before the position of the agent


def draw_scene(axis: Any, environment: str | None, state: Array) -> None:
    """Draw what a state ``[S]`` says about the surroundings; nothing for an environment without a scene."""
    scene = SCENES.get(environment or "")
    if scene is not None:
        scene(axis, np.asarray(state))


def _draw_disk(axis: Any, state: Array) -> None:
    angle = np.linspace(0, 2 * np.pi, 100)
    axis.fill(RADIUS * np.cos(angle), RADIUS * np.sin(angle), color="0.85", linewidth=0)


def _draw_block(axis: Any, state: Array) -> None:
    if len(state) == 2 * KEYPOINTS + 2:
        points = state[: 2 * KEYPOINTS].reshape(KEYPOINTS, 2)
        axis.plot(points[:, 0], points[:, 1], "s", color="0.8", markersize=7)


SCENES: dict[str, Callable[[Any, Array], None]] = {"two-ways": _draw_disk, "pusht": _draw_block}
