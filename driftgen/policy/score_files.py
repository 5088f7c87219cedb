"""The files of an evaluation: ``evaluation.json``, a table, videos and stills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from driftgen.errors import InputError
from driftgen.policy.environments import TASKS, SimulatedTask, check_rendering
from driftgen.policy.policy_loading import LoadOptions, choose_task, load_policy, policies_of_run
from driftgen.policy.rollout import Policy, Rollout, run_rollouts
from driftgen.policy.score import evaluate_policies, score_table
from driftgen.policy.simulation import check_episode_seeds
from driftgen.policy.videos import check_video_path, choose_rollouts, save_stills, save_video, video_name
from driftgen.support.atomic_write import atomic_write
from driftgen.support.folder_lock import hold_folder
from driftgen.support.provenance import command_line
from driftgen.support.whole_numbers import check_count

__all__ = ["run_policy_evaluation", "run_single_rollout"]

TABLE, STILLS, VIDEOS = "table.md", "stills.png", "videos"


def run_policy_evaluation(
    models: Sequence[str],
    options: LoadOptions,
    out: Path | None = None,
    *,
    checkpoints: int | None = None,
    videos: int = 2,
    stills: int = 2,
    **protocol: Any,
) -> dict[str, Any]:
    """Evaluate policies, print the result and write its files; return the record.

    Args:
        models: names for :func:`~driftgen.policy.policy_loading.load_policy`, averaged as checkpoints of one
            policy.
        options: how they are loaded.
        out: folder of the result; ``runs/policy-eval/NAME`` if None.
        checkpoints: evaluate this number of last checkpoints of the one run in ``models``.
        videos: number of best and of worst episodes of the last checkpoint to record.
        stills: the same for the rows of ``stills.png``.
        protocol: further options of :func:`~driftgen.policy.score.evaluate_policies`.
    """
    check_count("videos", videos, 0)
    check_count("stills", stills, 0)
    loaders: list[tuple[str, Callable[[], Policy]]]
    if checkpoints is None:
        loaders = [(name, _loader(name, options)) for name in models]
    elif len(models) == 1:
        loaders = policies_of_run(models[0], checkpoints, options)
    else:
        raise InputError(f"--checkpoints {checkpoints} is for one run, {len(models)} models are named")
    task, preset = choose_task(loaders[-1][1](), options.task or _task_named(models[-1]))
    folder = Path("runs/policy-eval") / Path(models[-1]).name if out is None else out
    if videos:
        check_video_path(folder / "check.mp4")
    if videos or stills or _has_cameras(task, preset):
        check_rendering(task)
    with hold_folder(folder):
        record, rollouts = evaluate_policies(
            loaders, task.name, preset, folder, command=command_line(), **protocol
        )
        with atomic_write(folder / TABLE) as scratch:
            scratch.write_text(score_table([(Path(models[-1]).name, record)]), encoding="utf-8")
        print(_summary(task.title, record))
        for rollout in choose_rollouts(rollouts, videos):
            save_video(task.name, rollout, folder / VIDEOS / video_name(task.name, rollout))
        if rollouts and stills:
            save_stills(task.name, choose_rollouts(rollouts, stills), folder / STILLS)
    print(folder)
    return record


def run_single_rollout(
    model: str,
    options: LoadOptions,
    *,
    seed: int = 0,
    video: Path | None = None,
    stills: Path | None = None,
    max_steps: int | None = None,
) -> Rollout:
    """Simulate one episode, print its outcome and write a video or stills; return the rollout."""
    check_episode_seeds("seed", seed)
    if video is not None:
        check_video_path(video)
    if stills is not None and stills.suffix != ".png":
        raise InputError(f"--stills {stills}: name a file that ends in .png")
    if options.task is None:
        options = options._replace(task=_task_named(model))
    policy = load_policy(model, options)
    task, preset = choose_task(policy, options.task)
    if video is not None or stills is not None or _has_cameras(task, preset):
        check_rendering(task)
    (rollout,) = run_rollouts(policy, task.name, preset, [seed], max_steps=max_steps, processes=1)
    outcome = "success" if rollout.success else "no success"
    needs = "" if rollout.success or not task.success else f" (that needs {task.success})"
    print(f"{task.title}, seed {seed}: score {rollout.score:.3f}, {outcome} in {rollout.steps} steps{needs}")
    if video is not None:
        print(save_video(task.name, rollout, video))
    if stills is not None:
        print(save_stills(task.name, [rollout], stills))
    return rollout


def _has_cameras(task: SimulatedTask, preset: str) -> bool:
    return any(len(shape) == 3 for shape in task.observations[preset].values())


def _loader(name: str, options: LoadOptions) -> Callable[[], Policy]:
    return lambda: load_policy(name, options)


def _task_named(model: str) -> str | None:
    """Return the task of a packaged policy, which has its name."""
    return model if model in TASKS and not Path(model).exists() else None


def _summary(title: str, record: dict[str, Any]) -> str:
    error = record["standard_error"]
    count = len(record["checkpoints"])
    text = f"{title}: score {record['mean']:.3f}"
    if error is not None:
        text += f" ± {error:.3f}"
    seeds = len(record["seeds"])
    text += f", success {record['success_rate']:.0%}, {seeds} seed{'s' if seeds > 1 else ''}"
    if count > 1:
        text += f", {count} checkpoints"
    if "phases" in record:
        text += "".join(f", p{k} {share:.2f}" for k, share in enumerate(record["phases"], 1))
    rows = record["checkpoints"][-1].get("latency") or []
    for row in rows[:1]:
        calls = row["network_calls"]
        calls = "" if calls is None else f", {calls} network call{'' if calls == 1 else 's'}"
        text += f"\n{row['milliseconds']:.1f} ms per chunk{calls} ({row['device']})"
    return text
