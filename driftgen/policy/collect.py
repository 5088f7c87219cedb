"""Demonstrations of a scripted expert in a simulator, stored in robomimic's HDF5 layout."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import driftgen
from driftgen.errors import InputError, unknown_name
from driftgen.policy.environments import find_task, make_environment
from driftgen.policy.lift_expert import LiftExpert
from driftgen.policy.simulation import MOST_EPISODES, check_episode_seeds, choose_processes
from driftgen.support.atomic_write import PARTIAL, atomic_write, make_folder
from driftgen.support.folder_lock import hold_file
from driftgen.support.progress import track
from driftgen.support.provenance import command_line, provenance
from driftgen.support.rng import derive_seed
from driftgen.support.untrusted_files import read_arrays, read_json, shown
from driftgen.support.whole_numbers import check_count

__all__ = ["Collected", "collect", "demonstrate"]

EXPERTS = {"lift": LiftExpert}
HELD_OUT = 0.1  # share of the episodes in mask/valid
ATTEMPTS = 20  # at most, per demonstration
AFTER_SUCCESS = 4  # more steps, so that the last windows end with the motion after the success
Arrays = dict[str, NDArray[Any]]


class Collected(NamedTuple):
    """Outcome of :func:`collect`.

    Attributes:
        path: the HDF5 file.
        episodes: stored demonstrations, each a success.
        attempts: simulated episodes; failures are not stored.
        steps: of the stored demonstrations.
    """

    path: Path
    episodes: int
    attempts: int
    steps: int

    @property
    def success_rate(self) -> float:
        """Share of the attempts that succeeded."""
        return self.episodes / self.attempts


def collect(
    task: str,
    out: Path,
    episodes: int = 200,
    *,
    seed: int = 0,
    images: bool = False,
    processes: int | None = None,
) -> Collected:
    """Store successful episodes of the scripted expert; an interrupted call resumes with the same options.

    Args:
        task: ``lift``.
        out: HDF5 file to write.
        episodes: number of demonstrations.
        seed: of the first episode; attempts count up from it. Evaluations use seeds from 100,000 on.
        images: True stores both cameras.
        processes: that simulate; one per CPU core if None.
    """
    if task not in EXPERTS:
        raise unknown_name("task", task, EXPERTS)
    check_count("episodes", episodes, most=MOST_EPISODES)
    check_episode_seeds("seed", seed, ATTEMPTS * episodes)
    try:
        import h5py  # noqa: F401
    except ImportError:
        raise InputError(
            "storing demonstrations needs h5py: pip install 'driftgen[policy]'", topic="missing-extra"
        ) from None
    if out.exists():
        raise InputError(f"{out} exists: remove it, or choose another file with --out")
    if out.suffix not in (".hdf5", ".h5"):
        raise InputError(f"--out {out}: name a file that ends in .hdf5")
    make_folder(out.parent)
    parts = out.with_name(out.name + PARTIAL)
    with hold_file(out):
        _check_options(parts, {"task": task, "seed": seed, "images": images})
        stored = _collect_parts(parts, task, episodes, seed, images, processes)
        names = [path for path in stored if path.suffix == ".npz"]
        with atomic_write(out) as scratch:
            steps = _write_robomimic(scratch, task, names, images, seed)
        shutil.rmtree(parts)
    return Collected(out, len(names), len(stored), steps)


def _check_options(parts: Path, options: dict[str, Any]) -> None:
    """Write the options of a collection, or compare them with those of an interrupted one."""
    path = make_folder(parts) / "options.json"
    if not path.exists():
        with atomic_write(path) as scratch:
            scratch.write_text(json.dumps(options))
    elif (found := read_json(path, "options of a collection", f"remove {parts}")) != options:
        raise InputError(
            f"{parts} holds an interrupted collection with {shown(found)}: repeat its options, or remove the "
            "folder"
        )


def _collect_parts(
    parts: Path, task: str, episodes: int, seed: int, images: bool, processes: int | None
) -> list[Path]:
    """Simulate attempts in the order of their seeds until enough succeed; return the file of each attempt."""
    stored: list[Path] = []
    successes = 0
    count = choose_processes(processes, episodes)
    work = partial(_attempt, parts, task, images)
    title = f"{find_task(task).title} demonstrations"
    with _workers(count) as mapped, track(title, episodes, "success rate") as progress:
        for path in mapped(work, _seeds(seed, ATTEMPTS * episodes)):
            stored.append(path)
            successes += path.suffix == ".npz"
            progress(successes, successes / len(stored))
            if successes == episodes:
                return stored
    raise InputError(f"{successes} of {len(stored)} attempts at {task} succeeded: report this as a bug")


def _seeds(first: int, count: int) -> Iterator[int]:
    yield from range(first, first + count)


@contextmanager
def _workers(count: int) -> Iterator[Any]:
    if count <= 1:
        yield map
        return
    pool = multiprocessing.get_context("spawn").Pool(count, initializer=_ignore_interrupt)
    try:
        yield pool.imap
    finally:
        pool.terminate()
        pool.join()


def _ignore_interrupt() -> None:
    """Leave Ctrl-C to the main process, which ends the workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@cache
def _environment(task: str, preset: str) -> Any:
    """Return the environment of this process: building one takes seconds."""
    return make_environment(task, preset)


def _attempt(parts: Path, task: str, images: bool, seed: int) -> Path:
    """Simulate one attempt, unless an interrupted collection has it; return its file."""
    success, failure = parts / f"seed-{seed:07d}.npz", parts / f"seed-{seed:07d}.failed"
    if success.exists() or failure.exists():
        return success if success.exists() else failure
    arrays = demonstrate(_environment(task, "image" if images else "state"), task, seed)
    if arrays is None:
        failure.touch(exist_ok=False)
        return failure
    named: dict[str, Any] = arrays  # mypy takes each array for the option allow_pickle
    with atomic_write(success) as scratch:
        np.savez(scratch, **named)
    return success


def demonstrate(environment: Any, task: str, seed: int) -> Arrays | None:
    """Return an episode of the expert by robomimic's names, or None if it fails.

    The gripper's motion is disturbed by noise that is correlated in time, while the action that the expert
    chose is stored: the data shows how to come back from states that the expert alone would not visit
    (DART, Laskey et al. 2017). ``actions_executed`` has the disturbed actions, which repeat the episode.
    """
    environment.reset(seed=seed)
    random = np.random.default_rng(derive_seed(seed, 1))
    expert = EXPERTS[task](random)
    scale, noise = random.uniform(0.02, 0.12), np.zeros(6)
    rows: dict[str, list[NDArray[Any]]] = {}
    remaining: int | None = None
    for _ in range(find_task(task).max_steps // 2):
        raw = environment.raw
        action = expert.act(raw)
        noise = 0.7 * noise + random.normal(0.0, scale, 6)
        executed = np.clip(action + np.append(noise, 0.0), -1.0, 1.0)
        state = environment.simulator.sim.get_state().flatten()
        entries = {f"obs/{key}": raw[key] for key in raw if _is_stored(key)}
        entries |= {"states": state, "actions": action, "actions_executed": executed}
        score = environment.step(executed)[1]
        entries["rewards"] = np.float64(score)
        for key, value in entries.items():
            rows.setdefault(key, []).append(np.array(value))
        if score and remaining is None:
            remaining = AFTER_SUCCESS
        if remaining is not None:
            if remaining == 0:
                return {key: np.stack(values) for key, values in rows.items()}
            remaining -= 1
    return None


def _is_stored(key: str) -> bool:
    """True for the observations of robomimic's files: object, robot and cameras."""
    return key == "object" or (key.startswith("robot0_") and "proprio" not in key) or key.endswith("_image")


def _write_robomimic(path: Path, task: str, names: list[Path], images: bool, seed: int) -> int:
    import h5py

    simulator = {"lift": "Lift"}[task]
    steps = 0
    valid = np.random.default_rng(seed).permutation(len(names))[: round(HELD_OUT * len(names))]
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        for number, name in enumerate(names):
            demo = data.create_group(f"demo_{number}")
            arrays = read_arrays(name, advice="remove it, and run the same command")
            for key, array in arrays.items():
                packed = {"compression": "gzip"} if key.endswith("_image") else {}
                demo.create_dataset(key, data=array, **packed)
            length = len(arrays["actions"])
            demo["dones"] = (np.arange(length) == length - 1).astype(np.int64)
            demo.attrs["num_samples"], demo.attrs["seed"] = length, int(name.stem.removeprefix("seed-"))
            steps += length
        for subset, chosen in (
            ("valid", set(valid.tolist())),
            ("train", set(range(len(names))) - set(valid)),
        ):
            file[f"mask/{subset}"] = np.array([f"demo_{i}" for i in sorted(chosen)], dtype="S")
        data.attrs["total"] = steps
        data.attrs["env_args"] = json.dumps(
            {
                "env_name": simulator,
                "type": 1,  # robosuite, as robomimic numbers its simulators
                "env_kwargs": {"robots": "Panda", "control_freq": 20, "use_camera_obs": images},
            }
        )
        data.attrs["collected_by"] = json.dumps(
            {**provenance(command_line()), "driftgen": driftgen.__version__}
        )
    return steps
