"""The scripted expert of Lift and the file that it fills."""

import json

import numpy as np
import pytest

from driftgen import InputError
from driftgen.policy import collect as collecting
from driftgen.policy.episode_files import open_episodes
from driftgen.policy.lift_expert import LiftExpert, _rotation

DOWN = np.array([1.0, 0.0, 0.0, 0.0])  # a gripper that points down


def quaternion(yaw, base=(0, 0, 0, 1)):
    """The rotation by ``yaw`` about the vertical axis after ``base``, as x, y, z, w."""
    x, y, z, w = base
    s, c = np.sin(yaw / 2), np.cos(yaw / 2)
    return np.array([c * x - s * y, c * y + s * x, c * z + s * w, c * w - s * z])


def seen(gripper, cube, yaw=0.0, cube_yaw=0.0):
    return {
        "robot0_eef_pos": np.array(gripper),
        "robot0_eef_quat": quaternion(yaw, DOWN),
        "cube_pos": np.array(cube),
        "cube_quat": quaternion(cube_yaw),
    }


def test_rotation_of_a_quaternion():
    assert np.allclose(_rotation(quaternion(0.3)) @ [1, 0, 0], [np.cos(0.3), np.sin(0.3), 0])
    assert np.allclose(_rotation(DOWN) @ [0, 0, 1], [0, 0, -1])


@pytest.mark.parametrize("seed", range(20))
def test_the_expert_in_a_point_world(seed):
    """A gripper that moves by a third of each action grasps a cube that follows closed fingers."""
    random = np.random.default_rng(seed)
    expert = LiftExpert(np.random.default_rng(seed))
    gripper, yaw = np.array([-0.1, 0.0, 1.0]), random.uniform(-0.2, 0.2)
    cube, cube_yaw = np.array([*random.uniform(-0.03, 0.03, 2), 0.82]), random.uniform(0, 2 * np.pi)
    closed = 0
    for _ in range(200):
        action = expert.act(seen(gripper, cube, yaw, cube_yaw))
        assert np.abs(action).max() <= 1
        gripper, yaw = gripper + 0.05 / 3 * action[:3], yaw + 0.5 / 3 * action[5]
        closed = closed + 1 if action[6] > 0 else 0
        if closed > 3:
            cube = cube + 0.05 / 3 * action[:3]
        if cube[2] > 0.87:
            break
    assert cube[2] > 0.87
    # The fingers, along the y axis of the gripper, are parallel to a face of the cube.
    fingers = _rotation(quaternion(yaw, DOWN))[:, 1]
    side = _rotation(quaternion(cube_yaw))[:, 0]
    assert min(abs(fingers @ side), np.sqrt(1 - min(1, (fingers @ side) ** 2))) < 0.2


def test_the_expert_begins_again_if_the_cube_is_lost():
    expert = LiftExpert(np.random.default_rng(0))
    expert.via_detour = False
    at = np.array([0.0, 0.0, 0.82])
    while expert.act(seen(at, at - expert.offset))[2] <= 0:
        pass  # closes, then lifts
    lost = expert.act(seen(at, at + np.array([0.1, 0.0, 0.0])))
    assert lost[6] < 0  # opens


class FakeLift:
    """A simulator whose episodes succeed for even seeds."""

    def __init__(self, task, preset):
        self.simulator = self.sim = self
        self.images = preset == "image"

    def reset(self, seed):
        self.seed, self.steps = seed, 0
        self.update()

    def update(self):
        state = seen([0, 0, 1.0 + self.steps], [0, 0, 0.8]) | {
            "object": np.full(10, self.seed, float),
            "robot0_gripper_qpos": np.zeros(2),
            "robot0_proprio-state": np.zeros(5),
        }
        cameras = {"agentview_image": np.full((4, 4, 3), self.steps, np.uint8)} if self.images else {}
        self.raw = state | cameras

    def step(self, action):
        self.steps += 1
        self.update()
        success = float(self.seed % 2 == 0 and self.steps >= 5)
        return {}, success, bool(success), False, {}

    def get_state(self):
        return np.array([self.seed, self.steps])


@pytest.fixture
def simulated(monkeypatch):
    pytest.importorskip("h5py")
    monkeypatch.setattr(collecting, "_environment", FakeLift)


@pytest.mark.usefixtures("simulated")
def test_successes_are_stored_in_the_layout_of_robomimic(tmp_path):
    import h5py

    result = collecting.collect("lift", tmp_path / "lift.hdf5", 12, seed=3, processes=1)
    assert (result.episodes, result.attempts, result.steps) == (12, 24, 12 * 9)
    assert result.success_rate == 0.5
    assert [path.name for path in tmp_path.iterdir()] == ["lift.hdf5"]
    with h5py.File(result.path) as file:
        assert [file[f"data/demo_{i}"].attrs["seed"] for i in range(12)] == list(range(4, 28, 2))
        demo = file["data/demo_0"]
        assert set(demo) == {"actions", "actions_executed", "dones", "obs", "rewards", "states"}
        assert "robot0_proprio-state" not in demo["obs"]
        assert demo["rewards"][:].tolist() == [0] * 4 + [1] * 5
        assert demo["dones"][:].tolist() == [0] * 8 + [1]
        assert not np.array_equal(demo["actions"][:], demo["actions_executed"][:])
        assert np.abs(demo["actions_executed"][:]).max() <= 1
        assert demo.attrs["num_samples"] == 9
        assert file["data"].attrs["total"] == 108
        assert json.loads(file["data"].attrs["env_args"])["env_name"] == "Lift"
        masks = {name: {row.decode() for row in file[f"mask/{name}"][:]} for name in ("train", "valid")}
        assert len(masks["train"]) == 11
        assert len(masks["valid"]) == 1
        assert not masks["train"] & masks["valid"]
    episodes = open_episodes(result.path)
    assert episodes.shapes == {"observation.state": (19,)}
    assert len(episodes.check_actions([-1] * 7, [1] * 7, "lift")) == 12
    assert open_episodes(result.path, subset="valid").steps == 9


@pytest.mark.usefixtures("simulated")
def test_an_interrupted_collection_resumes(tmp_path, monkeypatch):
    out, attempts = tmp_path / "lift.hdf5", []
    real = collecting.demonstrate

    def stops(environment, task, seed):
        attempts.append(seed)
        if len(attempts) == 8:
            raise KeyboardInterrupt
        return real(environment, task, seed)

    monkeypatch.setattr(collecting, "demonstrate", stops)
    with pytest.raises(KeyboardInterrupt):
        collecting.collect("lift", out, 6, processes=1)
    assert not out.exists()
    with pytest.raises(InputError, match="holds an interrupted collection"):
        collecting.collect("lift", out, 6, seed=1, processes=1)
    resumed = collecting.collect("lift", out, 6, processes=1)
    assert attempts == [*range(8), 7, 8, 9, 10]
    whole = collecting.collect("lift", tmp_path / "whole.hdf5", 6, processes=1)
    assert (resumed.attempts, whole.attempts) == (11, 11)
    first, second = open_episodes(out), open_episodes(whole.path)
    assert np.array_equal(first.actions, second.actions)
    with pytest.raises(InputError, match="exists"):
        collecting.collect("lift", out, 6, processes=1)


@pytest.mark.usefixtures("simulated")
def test_bad_options_of_collect(tmp_path):
    with pytest.raises(InputError, match="task='can' is not known: choose from lift"):
        collecting.collect("can", tmp_path / "a.hdf5")
    with pytest.raises(InputError, match=r"ends in \.hdf5"):
        collecting.collect("lift", tmp_path / "a.npz")
    with pytest.raises(InputError, match="seed=-1 must be from 0"):
        collecting.collect("lift", tmp_path / "a.hdf5", seed=-1)
    with pytest.raises(InputError, match="episodes=0"):
        collecting.collect("lift", tmp_path / "a.hdf5", 0)


@pytest.mark.slow
def test_the_expert_lifts_the_cube_in_robosuite(tmp_path):
    pytest.importorskip("robosuite")
    result = collecting.collect("lift", tmp_path / "lift.hdf5", 3, processes=1)
    assert result.attempts <= 4
    again = collecting.collect("lift", tmp_path / "again.hdf5", 1, processes=1)
    first, second = open_episodes(result.path, limit=1), open_episodes(again.path)
    assert np.array_equal(first.actions, second.actions)
