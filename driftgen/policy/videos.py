"""Videos and stills of rollouts, drawn by repeating their actions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftgen.errors import InputError
from driftgen.policy.environments import find_task, make_environment
from driftgen.policy.rollout import Rollout
from driftgen.support.atomic_write import atomic_write, make_folder
from driftgen.support.sheets import Sheet, write_sheet

__all__ = ["check_video_path", "choose_rollouts", "save_stills", "save_video", "video_name"]

STILLS, STILL_SIZE = 6, 192
HOLD = 0.7  # seconds that the last frame stays


def check_video_path(path: Path) -> Path:
    """Return the path; raise if its ending is not .mp4 or imageio is missing."""
    if path.suffix != ".mp4":
        raise InputError(f"--video {path}: name a file that ends in .mp4")
    _import_imageio()
    return path


def save_video(task: str, rollout: Rollout, path: Path) -> Path:
    """Write a rollout as an mp4 file and return the path."""
    imageio = _import_imageio()
    environment = make_environment(task, frames=True)
    rate = environment.metadata["render_fps"]
    make_folder(path.parent)
    try:
        with (
            atomic_write(path) as scratch,
            imageio.get_writer(scratch, fps=rate, codec="libx264", macro_block_size=16) as writer,
        ):
            frame = None
            for frame, _ in _frames(environment, rollout):
                writer.append_data(frame)
            for _ in range(round(HOLD * rate)):
                writer.append_data(frame)
    finally:
        environment.close()
    return path


def save_stills(task: str, rollouts: Sequence[Rollout], path: Path, count: int = STILLS) -> Path:
    """Write frames of rollouts as a PNG, one row each, from the first step to the last."""
    from PIL import Image

    images, captions = [], []
    environment = make_environment(task, frames=True)
    try:
        for rollout in rollouts:
            wanted = np.linspace(0, rollout.steps, count).round().astype(int).tolist()
            kept = {
                step: (Image.fromarray(frame).resize((STILL_SIZE, STILL_SIZE)), score)
                for step, (frame, score) in enumerate(_frames(environment, rollout))
                if step in wanted
            }
            images += [kept[step][0] for step in wanted]
            captions += [f"step {step}, {kept[step][1]:.2f}" for step in wanted]
    finally:
        environment.close()
    names = [f"{rollout.seed}: {rollout.score:.2f}" for rollout in rollouts]
    return write_sheet(path, Sheet(images, count, row_names=names, captions=captions))


def choose_rollouts(rollouts: Sequence[Rollout], count: int) -> list[Rollout]:
    """Return the ``count`` best rollouts and the ``count`` worst ones; the worst come last."""
    ordered = sorted(rollouts, key=lambda rollout: (-rollout.score, rollout.steps))
    best, rest = ordered[:count], ordered[count:]
    return best + rest[max(0, len(rest) - count) :]


def _frames(environment: Any, rollout: Rollout) -> Iterator[tuple[NDArray[np.uint8], float]]:
    """Yield the frame and the score before the first action and after each one."""
    environment.reset(seed=rollout.seed)
    yield environment.render(), 0.0
    for action, expected in zip(rollout.actions, rollout.scores, strict=True):
        score = float(environment.step(action)[1])
        if abs(score - expected) > 1e-6:
            raise RuntimeError(f"seed {rollout.seed}: the repeated episode scores {score}, it had {expected}")
        yield environment.render(), score


def _import_imageio() -> Any:
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401
    except ImportError:
        raise InputError(
            "videos need imageio and its ffmpeg: pip install 'driftgen[policy]'", topic="missing-extra"
        ) from None
    return imageio


def video_name(task: str, rollout: Rollout) -> str:
    """Return the name of a video, such as ``pusht-100003-success.mp4``."""
    outcome = "success" if rollout.success else "failure"
    return f"{find_task(task).name}-{rollout.seed}-{outcome}.mp4"
