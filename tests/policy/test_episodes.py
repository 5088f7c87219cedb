"""Episodes in memory and the windows over them, against a loop that copies Diffusion Policy's rule."""

import numpy as np
import pytest

from driftgen import InputError
from driftgen.policy.episodes import Episodes, Windows


def numbered(lengths, cameras=()):
    """Episodes whose state and action hold the number of the step."""
    steps = sum(lengths)
    numbers = np.arange(steps, dtype=np.float32)
    observations = {"observation.state": np.stack([numbers, -numbers], 1)}
    for camera in cameras:
        observations[camera] = np.broadcast_to(
            (np.arange(steps) % 256).astype(np.uint8)[:, None, None, None], (steps, 4, 6, 3)
        )
    return Episodes(observations, numbers[:, None] * 10, np.cumsum(lengths))


def padded_windows(lengths, horizon, before, after):
    """Every window as a list of steps, by going through the padded episodes."""
    start, windows = 0, []
    for length in lengths:
        padded = [start] * before + list(range(start, start + length)) + [start + length - 1] * after
        windows += [padded[i : i + horizon] for i in range(len(padded) - horizon + 1)]
        start += length
    return windows


@pytest.mark.parametrize("seed", range(60))
def test_windows_are_those_of_padded_episodes(seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 26, random.integers(1, 6)).tolist()
    horizon = int(random.integers(1, 17))
    observed = int(random.integers(1, horizon + 1))
    executed = int(random.integers(1, horizon - observed + 2))
    expected = padded_windows(lengths, horizon, observed - 1, executed - 1)
    if not expected:
        with pytest.raises(InputError, match="too few"):
            Windows(numbered(lengths), horizon, observed, executed)
        return
    windows = Windows(numbered(lengths), horizon, observed, executed)
    assert len(windows) == len(expected)
    observations, actions = windows.load(np.arange(len(windows)))
    assert actions.dtype == np.float32
    assert np.array_equal(actions[..., 0], 10.0 * np.array(expected))
    assert np.array_equal(observations["observation.state"][..., 0], np.array(expected)[:, :observed])
    episode = np.searchsorted(np.cumsum(lengths), np.array(expected)[:, 0], side="right")
    assert np.array_equal(windows.episode_of(np.arange(len(windows))), episode)


def test_a_batch_has_every_camera_and_its_own_order():
    windows = Windows(numbered([30, 20], ["observation.images.front", "observation.images.wrist"]))
    observations, actions = windows.load([30, 0, 3])
    assert {key: value.shape for key, value in observations.items()} == {
        "observation.state": (3, 2, 2),
        "observation.images.front": (3, 2, 4, 6, 3),
        "observation.images.wrist": (3, 2, 4, 6, 3),
    }
    assert observations["observation.images.front"].dtype == np.uint8
    assert actions.shape == (3, 16, 1)
    assert np.array_equal(actions[1, :3, 0], [0, 0, 10])  # begins one step before the episode
    with pytest.raises(IndexError):
        windows.load([len(windows)])


def test_episodes_can_be_taken_apart():
    episodes = numbered([3, 5, 2], ["observation.image"])
    assert (len(episodes), episodes.steps, episodes.lengths.tolist()) == (3, 10, [3, 5, 2])
    assert episodes.shapes == {"observation.state": (2,), "observation.image": (4, 6, 3)}
    assert [part.actions[:, 0].tolist() for part in episodes][2] == [80, 90]
    chosen = episodes.select([2, 0])
    assert chosen.ends.tolist() == [2, 5]
    assert chosen.actions[:, 0].tolist() == [80, 90, 0, 10, 20]
    with pytest.raises(InputError, match="there are 0 to 2"):
        episodes.select([3])


def test_held_out_episodes_depend_on_the_seed_alone():
    episodes = numbered([2] * 50)
    train, held_out = episodes.split(0.1, seed=3)
    again, _ = episodes.split(0.1, seed=3)
    other, _ = episodes.split(0.1, seed=4)
    assert (len(train), len(held_out)) == (45, 5)
    assert not set(train.actions[:, 0]) & set(held_out.actions[:, 0])
    assert np.array_equal(train.actions, again.actions)
    assert not np.array_equal(train.actions, other.actions)
    assert episodes.split(0.0) == (episodes, None)
    with pytest.raises(
        InputError, match=r"holds 1 episode: .* use --set data\.validation=0, or fraction=0 in"
    ):
        numbered([2]).split(0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ends": np.array([5, 3, 10])}, "end of episode 1 is 3, the end before it is 5"),
        ({"ends": np.array([0, 10])}, "end of episode 0 is 0"),
        ({"ends": np.array([4, 9])}, "ends at step 9, but there are 10 actions"),
        ({"ends": np.array([4.0, 10.0])}, "dtype float64"),
        ({"observations": {}}, "holds no observations"),
        ({"observations": {"state": np.zeros((10, 2))}}, "observation 'state' is not known"),
        ({"observations": {"observation.state": np.zeros((9, 2))}}, "has 9 steps, actions have 10"),
        ({"observations": {"observation.state": np.full((10, 2), np.nan)}}, "of step 0 is not finite"),
        ({"observations": {"observation.image": np.zeros((10, 4, 4, 3))}}, "dtype float64, expected uint8"),
        ({"observations": {"observation.state": np.zeros((10, 0))}}, r"state has shape \[10, 0\]"),
        ({"actions": np.zeros(10)}, r"actions has shape \[10\]"),
        ({"actions": np.zeros((10, 0))}, r"actions has shape \[10, 0\]"),
    ],
)
def test_bad_episodes_are_named_in_one_line(change, message):
    good = {
        "observations": {"observation.state": np.zeros((10, 2))},
        "actions": np.zeros((10, 1)),
        "ends": np.array([4, 10]),
    }
    Episodes(**good)
    with pytest.raises(InputError, match=message) as raised:
        Episodes(**(good | change), source="demo.zarr")
    assert str(raised.value).startswith("demo.zarr")
    assert "\n" not in str(raised.value)


def test_actions_out_of_range_are_named():
    episodes = numbered([10])
    assert episodes.check_actions([0], [90], "PushT") is episodes
    with pytest.raises(InputError, match="action 0 of step 6 is 60, PushT takes 0 to 50"):
        episodes.check_actions([0], [50], "PushT")
    with pytest.raises(InputError, match="an action has 1 values, PushT takes 2"):
        episodes.check_actions([0, 0], [1, 1], "PushT")


@pytest.mark.parametrize("sizes", [(16, 2, 16), (4, 5, 1), (16, 0, 8), (16, 2, 0)])
def test_sizes_of_windows_fit_together(sizes):
    with pytest.raises(InputError, match="do not fit together"):
        Windows(numbered([30]), *sizes)
