"""PushT: observations of Diffusion Policy's low-dim task, initial states, determinism, rollouts."""

import sys

import numpy as np
import pytest

pytest.importorskip("gym_pusht")

from driftgen import InputError
from driftgen.policy import pusht
from driftgen.policy.environments import TASKS, find_task, make_environment, matching_observations
from driftgen.policy.rollout import RandomPolicy, run_rollouts
from driftgen.policy.simulation import Simulation

# Steps 0 and 20,000 of Diffusion Policy's PushT data: pose and keypoints.
RECORDED = [
    (
        [222.0, 97.0, 222.99382, 381.59903, 3.0079994],
        [
            *([201.814, 293.595], [283.592, 374.652], [162.809, 391.093], [219.860, 356.247]),
            *([220.575, 258.004], [179.962, 354.229], [258.245, 343.838], [231.295, 317.055]),
            [199.889, 386.420],
        ],
    ),
    (
        [363.712, 356.49789, 290.95172, 270.90387, 0.56126845],
        [
            *([250.874, 352.065], [239.956, 237.440], [343.261, 302.146], [277.127, 292.385]),
            *([213.675, 367.391], [306.482, 319.480], [239.696, 277.340], [243.249, 315.168]),
            [311.786, 281.995],
        ],
    ),
]
# The first eight actions of the data and the position of the agent after them.
ACTIONS = [[233, 71], [229, 83], [229, 86], [230, 86], [239, 89], [251, 95], [263, 102], [273, 108]]
AGENT = [258.14642, 99.59151]


@pytest.fixture(autouse=True, scope="module")
def _simulator():
    """Import the simulator before the first test is timed."""
    make_environment("pusht").reset(seed=0)


@pytest.mark.parametrize("preset", ["keypoints", "pose", "image"])
def test_observations_have_the_shapes_of_the_task(preset):
    environment = make_environment("pusht", preset)
    observation, _ = environment.reset(seed=3)
    assert environment.observation_space.contains(observation)
    assert {key: array.shape for key, array in observation.items()} == TASKS["pusht"].observations[preset]
    observation, score, done, _, info = environment.step([100.0, 300.0])
    assert environment.observation_space.contains(observation)
    assert info["score"] == score == pytest.approx(min(info["coverage"] / 0.95, 1))
    assert not done
    assert environment.render().shape == (384, 384, 3)
    shapes = {key: array.shape for key, array in observation.items()}
    assert matching_observations(find_task("pusht"), shapes) == preset


@pytest.mark.parametrize(("pose", "points"), RECORDED)
def test_keypoints_are_those_of_the_data(pose, points):
    environment = make_environment("pusht")
    observation, _ = environment.reset(options={"pose": pose})
    expected = np.concatenate([np.reshape(points, -1), pose[:2]])
    assert np.abs(observation["observation.state"] - expected).max() < 0.002


def test_a_recorded_motion_is_repeated():
    environment = make_environment("pusht", "pose")
    environment.reset(options={"pose": RECORDED[0][0]})
    for action in ACTIONS:
        observation, *_ = environment.step(action)
    assert np.abs(observation["observation.state"] - [*AGENT, *RECORDED[0][0][2:]]).max() < 1e-3


def test_the_block_on_its_target_is_success():
    environment = make_environment("pusht")
    environment.reset(options={"pose": [60, 60, 256, 256, np.pi / 4]})
    _, score, done, _, info = environment.step([60, 60])
    assert (score, done, info["success"]) == (1.0, True, True)
    environment.reset(options={"pose": [60, 60, 250, 262, np.pi / 4]})
    _, score, done, _, info = environment.step([60, 60])
    assert 0.5 < info["coverage"] < 0.95
    assert score == pytest.approx(info["coverage"] / 0.95)
    assert not done


def test_initial_states_are_drawn_as_in_diffusion_policy():
    poses = np.stack([pusht.initial_pose(seed) for seed in range(100_000, 100_200)])
    assert np.array_equal(poses[7], pusht.initial_pose(100_007))
    assert len(np.unique(poses[:, 0])) > 100
    low, high = poses.min(axis=0), poses.max(axis=0)
    assert (low[:2] >= 50).all()
    assert (high[:2] < 450).all()
    assert (low[2:4] >= 100).all()
    assert (high[2:4] < 400).all()
    # A normal angle of standard deviation 2 pi, not a uniform one.
    assert poses[:, 4].std() == pytest.approx(2 * np.pi, rel=0.2)
    observation, _ = make_environment("pusht", "pose").reset(seed=100_007)
    assert np.abs(observation["observation.state"][:2] - poses[7, :2]).max() < 1e-4


def rollouts(**options):
    return run_rollouts(RandomPolicy("pusht"), "pusht", "keypoints", [7, 8, 9], max_steps=12, **options)


def test_an_episode_depends_on_its_seed_alone():
    together, again, other = (
        rollouts(processes=1),
        rollouts(processes=1, batch=1),
        rollouts(processes=1, seed=1),
    )
    for one, two, different in zip(together, again, other, strict=True):
        assert (one.seed, one.score, one.steps) == (two.seed, two.score, 12)
        assert np.array_equal(one.actions, two.actions)
        assert np.array_equal(one.scores, two.scores)
        assert not np.array_equal(one.actions, different.actions)
    assert not np.array_equal(together[0].actions, together[1].actions)


@pytest.mark.distributed
def test_processes_change_no_result():
    alone, spread = rollouts(processes=1), rollouts(processes=2)
    for one, two in zip(alone, spread, strict=True):
        assert np.array_equal(one.actions, two.actions)
        assert np.array_equal(one.scores, two.scores)


class Recorder:
    """Moves the agent to the corner that its seed names and keeps what it was shown."""

    horizon, observed, executed = 6, 3, 2

    def __init__(self):
        self.seen, self.resets = [], 0

    def reset(self):
        self.resets += 1

    def predict(self, observations, noise=None, seed=None):
        self.seen.append(observations)
        count = len(self.seen)
        rows = len(observations["observation.state"])
        # Only the third and fourth action are executed: those of the latest observation and the next one.
        chunk = np.array([[0, 0], [0, 0], [100, 400], [100, 400 + count], [0, 0], [0, 0]], float)
        return np.repeat(chunk[None], rows, axis=0)


def test_histories_and_executed_actions():
    policy = Recorder()
    (rollout,) = run_rollouts(policy, "pusht", "pose", [5], max_steps=5, processes=1)
    assert policy.resets == 1
    assert rollout.actions.tolist() == [[100, 400], [100, 401], [100, 400], [100, 402], [100, 400]]
    environment = make_environment("pusht", "pose")
    first, _ = environment.reset(seed=5)
    seen = [first["observation.state"]] * 3
    for number, action in enumerate(rollout.actions):
        if number % 2 == 0:
            shown = policy.seen[number // 2]["observation.state"]
            assert shown.shape == (1, 3, 5)
            assert np.array_equal(shown[0], np.stack(seen[-3:]))
        seen.append(environment.step(action)[0]["observation.state"])


def test_an_episode_ends_with_success():
    class Still(RandomPolicy):
        def predict(self, observations, noise=None, seed=None):
            return np.full((len(observations["observation.state"]), 16, 2), 60.0)

    with Simulation("pusht", "pose") as simulation:
        simulation.reset([1])
        episode = simulation._group.episodes[0]
        episode.environment.reset(options={"pose": [60, 60, 256, 256, np.pi / 4]})
        status = simulation.advance({0: np.full((8, 2), 60.0)})[0]
    assert status.scores == [1.0]
    assert status.done
    assert status.success


def test_bad_input_gives_one_line(monkeypatch):
    with pytest.raises(InputError, match="task='push' is not known: did you mean 'pusht'"):
        make_environment("push")
    with pytest.raises(InputError, match="observe of pusht='states' is not known"):
        make_environment("pusht", "states")
    with pytest.raises(InputError, match=r"observes observation.state 7, pusht offers keypoints"):
        matching_observations(find_task("pusht"), {"observation.state": (7,)})
    with pytest.raises(InputError, match="seeds are empty"):
        run_rollouts(RandomPolicy("pusht"), "pusht", "pose", [])

    class Broken(RandomPolicy):
        def predict(self, observations, noise=None, seed=None):
            return np.full((1, 16, 2), np.nan)

    with pytest.raises(InputError, match="not finite"):
        run_rollouts(Broken("pusht"), "pusht", "pose", [1], processes=1)
    monkeypatch.setitem(sys.modules, "gym_pusht", None)
    monkeypatch.delitem(sys.modules, "driftgen.policy.pusht")
    with pytest.raises(InputError, match=r"pip install 'driftgen\[policy\]'") as raised:
        make_environment("pusht")
    assert "\n" not in str(raised.value)
