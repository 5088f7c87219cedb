"""Simulated tasks: limits, scores and observations of each, and the gymnasium environment behind it."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from driftgen.errors import InputError, unknown_name

if TYPE_CHECKING:
    import gymnasium

    from driftgen.policy.episodes import Episodes

__all__ = [
    "TASKS",
    "SimulatedTask",
    "check_demonstrations",
    "check_rendering",
    "find_task",
    "make_environment",
    "matching_observations",
    "quiet",
    "simulator_versions",
]

MUJOCO = "mujoco==3.3.7"  # both packages fail with newer versions


@dataclass(frozen=True)
class SimulatedTask:
    """A task of Diffusion Policy's evaluation.

    An environment of it has observations under LeRobot's keys. Every step returns ``info["score"]``, from 0
    to 1, and ``info["success"]``; an episode ends with success. ``reset(seed=...)`` fixes everything random.

    Attributes:
        name: of the command line.
        title: for tables.
        max_steps: of an episode, as in Diffusion Policy.
        score: meaning of the best score of an episode.
        observations: presets and the shapes that they have; the first one is the default.
        action_range: lowest and highest action, of each dimension.
        module: module of the environment, imported on first use.
        package: missing package if that import fails, as pip names it.
        distributions: packages that results depend on.
        phases: parts of the task, each of which counts 1 / ``phases``.
        success: what success needs, where the score does not say it.
    """

    name: str
    title: str
    max_steps: int
    score: str
    observations: dict[str, dict[str, tuple[int, ...]]]
    action_range: tuple[tuple[float, ...], tuple[float, ...]]
    module: str
    package: str
    distributions: tuple[str, ...]
    phases: int = 1
    success: str = ""


def _vector(size: int) -> dict[str, tuple[int, ...]]:
    return {"observation.state": (size,)}


_CAMERAS = {
    "observation.state": (9,),
    "observation.images.agentview": (84, 84, 3),
    "observation.images.robot0_eye_in_hand": (84, 84, 3),
}


def _robosuite(name: str, title: str, state: int) -> SimulatedTask:
    return SimulatedTask(
        name,
        title,
        400,
        "success",
        {"state": _vector(state), "image": _CAMERAS},
        ((-1.0,) * 7, (1.0,) * 7),
        "driftgen.policy.robosuite_tasks",
        f"robosuite {MUJOCO} 'numpy>=2'",  # without a bound, pip goes back to NumPy 1
        ("robosuite", "mujoco"),
    )


TASKS = {
    task.name: task
    for task in (
        SimulatedTask(
            "pusht",
            "PushT",
            300,
            "coverage of the target over 0.95, at most 1",
            {
                "keypoints": _vector(20),
                "pose": _vector(5),
                "image": {**_vector(2), "observation.image": (96, 96, 3)},
            },
            ((0.0, 0.0), (512.0, 512.0)),
            "driftgen.policy.pusht",
            "driftgen[policy]",
            ("gym-pusht", "pymunk"),
            success="more than 95% of the target covered",
        ),
        _robosuite("lift", "Lift", state=19),
        _robosuite("can", "Can", state=23),
        SimulatedTask(
            "kitchen",
            "Kitchen",
            280,
            "share of four parts done",
            {"state": _vector(60)},
            ((-1.0,) * 9, (1.0,) * 9),
            "driftgen.policy.kitchen",
            f"gymnasium-robotics {MUJOCO}",
            ("gymnasium-robotics", "mujoco"),
            phases=4,
            success="all four parts done",
        ),
    )
}


def find_task(name: str) -> SimulatedTask:
    """Return the task of a name."""
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    return TASKS[name]


def simulator_versions(task: SimulatedTask) -> dict[str, str]:
    """Return the installed versions of the packages that simulate a task."""
    found = {}
    for name in task.distributions:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def make_environment(name: str, observe: str | None = None, *, frames: bool = False) -> gymnasium.Env:
    """Build the environment of a task.

    Args:
        name: one of :data:`TASKS`.
        observe: preset of the observations; None for the first one.
        frames: True if ``render()`` is called.
    """
    task = find_task(name)
    observe = observe or next(iter(task.observations))
    if observe not in task.observations:
        raise unknown_name(f"observe of {name}", observe, task.observations)
    try:
        module = import_module(task.module)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "driftgen":
            raise
        raise InputError(
            f"{task.title} needs {missing or task.package}, which cannot be imported ({_one_line(error)}): "
            f"pip install {' '.join(map(_quoted, task.package.split()))}",
            topic="missing-extra",
        ) from None
    environment: gymnasium.Env = module.make(name, observe, frames)
    return environment


def check_demonstrations(episodes: Episodes, name: str | None) -> Episodes:
    """Return the episodes; raise if an action lies outside of the range of the task, if it is a known one."""
    if name not in TASKS:
        return episodes
    low, high = TASKS[name].action_range
    return episodes.check_actions(low, high, TASKS[name].title)


def matching_observations(task: SimulatedTask, shapes: dict[str, tuple[int, ...]]) -> str:
    """Return the preset whose observations have these shapes: those that a policy was trained with."""
    wanted = {key: tuple(shape) for key, shape in shapes.items()}
    for preset, offered in task.observations.items():
        if offered == wanted:
            return preset
    offers = "; ".join(f"{preset}: {_listed(offered)}" for preset, offered in task.observations.items())
    raise InputError(
        f"the policy observes {_listed(wanted)}, {task.name} offers {offers}: choose the task that it was "
        "trained for with --task"
    )


def check_rendering(task: SimulatedTask) -> None:
    """Draw one frame; raise if that fails on this machine. Takes seconds for the tasks of MuJoCo."""
    try:
        with quiet():
            environment = make_environment(task.name, frames=True)
            environment.reset(seed=0)
            environment.render()
            environment.close()
    except InputError:
        raise
    except Exception as error:  # each OpenGL library has errors of its own
        raise InputError(
            f"{task.title} cannot be drawn ({type(error).__name__}: {_one_line(error)}): set MUJOCO_GL=egl "
            "on a machine with a GPU, or install libosmesa6 and set MUJOCO_GL=osmesa"
        ) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide the notices of simulators about parts that are not used here."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _listed(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{key} {'x'.join(map(str, shape))}" for key, shape in shapes.items())


def _quoted(package: str) -> str:
    return f"'{package}'" if "[" in package else package


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
