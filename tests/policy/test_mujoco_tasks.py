"""Lift, Can and Kitchen: observations, seeds, scores. Needs robosuite and gymnasium-robotics."""

import sys
import types

import numpy as np
import pytest

from driftgen import InputError
from driftgen.policy.environments import TASKS, check_rendering, find_task, make_environment

PACKAGES = {"lift": "robosuite", "can": "robosuite", "kitchen": "gymnasium_robotics"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_a_seed_fixes_the_episode(name):
    pytest.importorskip(PACKAGES[name])
    environment = make_environment(name)
    low, high = TASKS[name].action_range
    actions = np.random.default_rng(0).uniform(low, high, (5, len(low)))

    def simulate(seed):
        observation, _ = environment.reset(seed=seed)
        states = [observation]
        for action in actions:
            observation, score, done, _, info = environment.step(action)
            assert environment.observation_space.contains(observation)
            assert (score, done) == (info["score"], info["success"]) == (0.0, False)
            states.append(observation)
        shapes = {key: array.shape for key, array in observation.items()}
        assert shapes == next(iter(TASKS[name].observations.values()))
        return np.stack([state["observation.state"] for state in states])

    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = simulate(3), simulate(3), simulate(4)
    assert np.array_equal(first, again)
    assert not np.array_equal(first[0], other[0])
    # The simulators draw from NumPy's global generator, whose state is restored.
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    environment.close()


class Simulator:
    """A simulator that draws its first state from NumPy's global generator, or from one of its own."""

    def __init__(self, owns):
        if owns:
            self.rng = np.random.default_rng()
            self.sampler = self.rng  # parts of the scene hold the same generator
        self.draw = self.sampler.random if owns else np.random.random_sample

    def reset(self):
        keys = ("object-state", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
        return dict(zip(keys, np.split(self.draw(19), (10, 13, 17)), strict=True))


# robosuite 1.5.1 draws from the global generator, 1.5.2 from one of its own.
@pytest.mark.parametrize("owns", [False, True])
def test_a_seed_reaches_every_version_of_robosuite(owns, monkeypatch):
    pytest.importorskip("gymnasium")
    robosuite = types.SimpleNamespace(make=lambda name, **options: Simulator(owns))
    controllers = types.SimpleNamespace(load_composite_controller_config=lambda robot: {})
    monkeypatch.setitem(sys.modules, "robosuite", robosuite)
    monkeypatch.setitem(sys.modules, "robosuite.controllers", controllers)
    monkeypatch.delitem(sys.modules, TASKS["lift"].module, raising=False)
    environments = make_environment("lift"), make_environment("lift")
    monkeypatch.delitem(sys.modules, TASKS["lift"].module)  # the next test imports the real one

    def start(index, seed):
        return environments[index].reset(seed=seed)[0]["observation.state"].tolist()

    first, other = start(0, 3), start(0, 4)
    assert start(0, 3) == start(1, 3) == first != other
    assert start(0, None) != start(0, None)


@pytest.mark.slow
def test_lift_succeeds_when_the_cube_is_in_the_air():
    pytest.importorskip("robosuite")
    environment = make_environment("lift")
    observation, _ = environment.reset(seed=0)
    # The state begins with the cube's position.
    assert np.allclose(observation["observation.state"][:3], environment.raw["cube_pos"])
    simulator = environment.simulator
    pose = np.concatenate([environment.raw["cube_pos"] + [0, 0, 0.3], [1, 0, 0, 0]])
    simulator.sim.data.set_joint_qpos(simulator.cube.joints[0], pose)
    _, score, done, _, info = environment.step(np.zeros(7))
    assert (score, done, info["success"]) == (1.0, True, True)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_simulator_gives_one_line(name, monkeypatch):
    pytest.importorskip("gymnasium")
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    monkeypatch.delitem(sys.modules, TASKS[name].module, raising=False)
    with pytest.raises(InputError, match=r"pip install \S+ mujoco==3\.3\.7") as raised:
        make_environment(name)
    assert "\n" not in str(raised.value)


def test_missing_opengl_gives_one_line(monkeypatch):
    pytest.importorskip("gym_pusht")
    check_rendering(find_task("pusht"))
    from driftgen.policy.pusht import PushT

    def fails(self):
        raise AttributeError("'NoneType' object has no attribute 'glGetError'\nin two lines")

    monkeypatch.setattr(PushT, "render", fails)
    with pytest.raises(InputError, match=r"cannot be drawn \(AttributeError.*set MUJOCO_GL=egl") as raised:
        check_rendering(find_task("pusht"))
    assert "\n" not in str(raised.value)
