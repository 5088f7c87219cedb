"""The ambiguous observation, and what policies do in it."""

import json

import pytest
import torch

from driftgen.errors import InputError
from driftgen.model_io import save_model
from driftgen.training.chunk_spread import compare_spread, find_ambiguity, measure_spread
from driftgen.training.policy_data import ChunkDraws, open_demonstrations
from driftgen.training.policy_task import build_policy
from driftgen.training.recipes import load_recipe
from driftgen.training.run_folder import create_run


def two_decisions():
    """Ten episodes of five windows: at position 0 half go up and half go down, later all go straight."""
    histories, chunks, episodes = [], [], []
    for episode in range(10):
        for position in range(5):
            histories.append([float(position), 0.001 * episode])
            height = (1.0 if episode % 2 else -1.0) if position == 0 else 0.0
            chunks.append([[height], [height]])
            episodes.append(episode)
    return torch.tensor(histories), torch.tensor(chunks), torch.tensor(episodes)


def test_finds_the_observation_after_which_demonstrators_differ():
    found = find_ambiguity(*two_decisions(), neighbors=6)
    assert found.window % 5 == 0
    assert found.neighbors[0] == found.window
    assert len({n // 5 for n in found.neighbors}) == 6  # one of each episode
    assert all(n % 5 == 0 for n in found.neighbors)
    # Three go up and three down: 18 of 30 ordered pairs are 2 apart in each coordinate.
    assert found.distance == pytest.approx(2 * 18 / 30, rel=1e-5)


def test_chunks_far_from_zero_differ_by_as_much():
    histories, chunks = torch.arange(30.0)[:, None], torch.tensor([0.0, 1.0]).repeat(15)[:, None, None]
    near, far = (find_ambiguity(histories, chunks + t, torch.arange(30), neighbors=30) for t in (0, 2.0**14))
    assert near.distance == pytest.approx(15 / 29, rel=1e-5)
    assert far == near


def test_takes_the_window_that_is_named():
    found = find_ambiguity(*two_decisions(), neighbors=4, window=12)
    assert found.window == 12
    assert found.distance == pytest.approx(0, abs=1e-6)
    with pytest.raises(InputError, match="window 50 does not exist: there are 0 to 49"):
        find_ambiguity(*two_decisions(), window=50)


def test_spread_of_known_chunks():
    up, down = torch.ones(1, 4, 2), -torch.ones(1, 4, 2)
    demonstrated = torch.cat([up, up, up, down])
    both = measure_spread(torch.cat([up, down]), demonstrated)
    assert both["ways"] == [0.5, 0.5]
    assert both["between"] == 0
    assert both["chunk_spread"] == pytest.approx(2)
    middle = measure_spread(torch.zeros(8, 4, 2), demonstrated)
    assert middle["between"] == 1
    assert middle["chunk_spread"] == 0
    assert middle["energy_score"] == pytest.approx(1)


METHODS = ("drifting", "regression")  # importing diffusers takes seconds


@pytest.fixture
def runs(tmp_path):
    """Runs of two methods, with the weights they begin with."""
    for method in METHODS:
        config = load_recipe(
            "two-ways", ["generator.options.widths=[8, 16]", "data.episodes=20", f"method={method}"]
        )
        create_run(tmp_path / method, config)
        draws = ChunkDraws(config, open_demonstrations(config.data), torch.device("cpu"))
        torch.manual_seed(0)
        save_model(build_policy(config, draws), tmp_path / method / "model")
    return [str(tmp_path / method) for method in METHODS]


def test_writes_figure_and_record(runs, tmp_path, capsys):
    record = compare_spread(runs, tmp_path / "out", chunks=4, rollouts=2)
    assert (tmp_path / "out" / "spread.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "out" / "spread.json").read_text()) == record
    drifting, regression = record["policies"]
    assert [row["network_calls"] for row in record["policies"]] == [1, 1]
    assert regression["chunk_spread"] == pytest.approx(0, abs=1e-6)
    assert drifting["chunk_spread"] > 0
    assert drifting["config"]["method"] == "drifting"
    assert record["demonstrated"]["ways"] == pytest.approx([0.5, 0.5], abs=0.3)
    state = record["observation"][-1]
    assert abs(state[0] + 1) < 0.1  # the decision is made at the start
    assert "drifting: energy score" in capsys.readouterr().out


@pytest.mark.parametrize("chunks", [0, 10**30])
def test_a_number_of_chunks_that_cannot_be_drawn(tmp_path, chunks):
    with pytest.raises(InputError, match=f"^chunks={chunks} must be from 1 to 10,000$"):
        compare_spread([str(tmp_path)], tmp_path / "out", chunks=chunks)


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(InputError, match=r"is no training run: config\.yaml is missing"):
        compare_spread([str(tmp_path)], tmp_path / "out")
