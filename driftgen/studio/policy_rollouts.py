"""The Policy tab: simulate one episode and show it as a video."""

from __future__ import annotations

import tempfile
from pathlib import Path

from driftgen.errors import InputError
from driftgen.policy.environments import TASKS, check_rendering
from driftgen.policy.policy_loading import LoadOptions, choose_task, load_policy
from driftgen.policy.rollout import run_rollouts
from driftgen.policy.videos import check_video_path, save_video
from driftgen.studio.model_list import find_source, list_models
from driftgen.studio.readable_folders import ReadableFolders
from driftgen.studio.requests_and_answers import ModelEntry, RolloutRequest, RolloutVideo

__all__ = ["PolicyRollouts"]


class PolicyRollouts:
    """Answers requests of the Policy tab.

    Args:
        folders: that may be read.
        device: of the policies; the best one if None.
    """

    def __init__(self, folders: ReadableFolders, device: str | None = None) -> None:
        self.folders, self.device = folders, device

    def list_models(self, _: object = None) -> list[ModelEntry]:
        """Return the policies to choose from."""
        return list_models(self.folders, "policy")

    def roll_out(self, request: RolloutRequest) -> RolloutVideo:
        """Simulate an episode. The same seed gives the same episode."""
        if not 0 <= request.seed < 2**31:
            raise InputError(f"seed {request.seed}: give an integer from 0 to 2^31 - 1")
        named = request.model.strip()
        source = find_source(named, self.folders)
        policy = load_policy(source, LoadOptions(device=self.device))
        task, preset = choose_task(policy, named if named in TASKS else None)
        check_rendering(task)
        with tempfile.TemporaryDirectory(prefix="driftgen-") as name:
            path = check_video_path(Path(name) / "episode.mp4")
            (rollout,) = run_rollouts(policy, task.name, preset, [request.seed], processes=1)
            video = save_video(task.name, rollout, path).read_bytes()
        calls = getattr(policy, "calls", 1)
        each = "1 network call" if calls == 1 else f"{calls} network calls"
        outcome = "success" if rollout.success else "no success"
        note = (
            f"{task.title}, seed {request.seed}: score {rollout.score:.3f}, {outcome} in {rollout.steps} "
            f"steps; {each} per chunk of actions."
        )
        return RolloutVideo(video, note)
