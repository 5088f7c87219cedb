"""Two ways around an obstacle: drifting uses both, regression drives into it."""

import time

import numpy as np
import pytest

import driftgen as dg
from driftgen.policy.two_ways import DETOUR, GOAL, RADIUS, demonstrate, navigate


def test_demonstrations_pass_above_and_below_without_touching():
    episodes = demonstrate(20)
    heights = []
    for episode in episodes:
        path = np.concatenate([episode.observations["observation.state"], episode.actions[-1:]])
        assert np.linalg.norm(path, axis=1).min() > RADIUS
        assert np.allclose(path[-1], GOAL)
        heights.append(path[np.abs(path).argmax(0)[1], 1])
    assert np.abs(heights).min() > DETOUR - 0.2
    assert (np.array(heights) > 0).sum() == 10


class Scripted:
    """Drives along a straight line, or around the disk on one side."""

    observed, executed = 2, 4

    def __init__(self, side):
        self.side = side

    def predict(self, observations, noise=None, seed=None):
        state = observations["observation.state"][:, -1]
        steps = np.arange(-1, 7)[None, :, None]
        chunk = state[:, None] + 0.1 * (steps + 1) * np.array([1.0, 0.0])
        x = np.clip((chunk[..., 0] + 1) / 2, 0, 1)
        chunk[..., 1] = self.side * DETOUR * np.sin(np.pi * x)
        return np.where(x[..., None] >= 1, GOAL, chunk)


@pytest.mark.parametrize(("side", "success"), [(0, 0), (1, 1), (-1, 1)])
def test_rollouts_of_known_policies(side, success):
    result = navigate(Scripted(side), rollouts=4)
    assert result.success.mean() == success
    if side:
        assert (result.above == (side > 0)).all()


@pytest.mark.slow
def test_drifting_uses_both_ways_and_regression_does_not(tmp_path):
    started = time.process_time()
    run = dg.train("two-ways", tmp_path / "drifting", device="cpu")
    drifting = navigate(run.policy(), rollouts=100)
    assert time.process_time() - started < 60
    assert drifting.success.mean() > 0.85
    assert 0.2 < drifting.above.mean() < 0.8
    baseline = dg.train("two-ways", tmp_path / "regression", device="cpu", method="regression")
    regression = navigate(baseline.policy(), rollouts=100)
    assert regression.success.mean() < 0.5
