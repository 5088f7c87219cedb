"""Scores by Diffusion Policy's protocol, latency, files of an evaluation and the commands."""

import json
import types
from importlib.metadata import version

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen import InputError
from driftgen.policy import policy_loading, score
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.policy.latency import measure_latency
from driftgen.policy.policy_loading import LoadOptions, choose_task, policies_of_run
from driftgen.policy.rollout import RandomPolicy, Rollout, run_rollouts
from driftgen.policy.score import evaluate_policies, score_table, summarize
from driftgen.policy.score_files import _summary, run_policy_evaluation, run_single_rollout
from driftgen.policy.videos import choose_rollouts
from tests.support.small_policy import save_small_policy

SHORT = {"episodes": 3, "max_steps": 12, "processes": 1}


def test_the_standard_error_comes_from_the_seeds():
    scores = np.random.default_rng(0).random((10, 50))
    summary = summarize(scores)
    assert summary.mean == pytest.approx(scores.mean())
    assert summary.standard_error == pytest.approx(np.std(scores.mean(axis=0), ddof=1) / np.sqrt(50))
    assert summary.deviation == pytest.approx(np.std(scores.mean(axis=1), ddof=1))
    # Equal checkpoints are no further evidence: the error stays that of one.
    assert summarize([scores[0]] * 10).standard_error == pytest.approx(summarize([scores[0]]).standard_error)
    assert summarize([[0.5]]) == (0.5, None, None)


def test_phases_count_completed_parts():
    assert score._phases(np.array([[0.0, 0.25, 0.5, 1.0]]), 4) == [0.75, 0.5, 0.25, 0.25]


class Network(torch.nn.Module):
    """Adds noise to the first two values of the state."""

    def __init__(self):
        super().__init__()
        self.shift = torch.nn.Parameter(torch.zeros(2))
        self.observations = {"observation.state": (20,)}

    def sample_noise(self, n, generator=None):
        return torch.randn(n, 16, 2, generator=generator)

    def forward(self, noise, state):
        return state[:, -1, None, -2:] + 30 * noise + self.shift


class NetworkPolicy:
    """Calls its network a number of times per chunk, as a diffusion policy does."""

    horizon, observed, executed = 16, 2, 8

    def __init__(self, calls=1, shift=0.0):
        self.network, self.calls, self.source = Network(), calls, {"ema": 0.99}
        self.network.shift.data.fill_(shift)

    def reset(self):
        pass

    def predict(self, observations, noise=None, seed=None):
        state = torch.as_tensor(observations["observation.state"])
        if noise is None:
            noise = self.network.sample_noise(len(state), torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for _ in range(self.calls):
                chunk = self.network(noise, state)
        return chunk


@pytest.mark.parametrize("calls", [1, 7])
def test_latency_counts_network_calls(calls):
    policy = NetworkPolicy(calls)
    found = measure_latency(policy, {"observation.state": (20,)}, batch=4, repeats=5)
    assert (found.network_calls, found.batch) == (calls, 4)
    assert 0 < found.best_milliseconds <= found.milliseconds < 1000
    assert found.actions_per_second == pytest.approx(8 / found.milliseconds * 1e3)
    assert found.repeats >= 5
    assert not policy.network._forward_pre_hooks
    assert " thread" in found.device


def test_latency_with_images_and_without_a_network():
    shapes = []

    class Camera:
        def predict(self, observations, noise=None, seed=None):
            shapes.append({key: (array.shape, array.dtype) for key, array in observations.items()})

    found = measure_latency(Camera(), {"observation.image": (96, 96, 3)}, repeats=2)
    assert found.network_calls is None
    assert shapes[0] == {"observation.image": ((1, 2, 96, 96, 3), np.uint8)}


def test_an_evaluation_resumes_by_weights(tmp_path):
    pytest.importorskip("gym_pusht")
    loads = []

    def loader(shift):
        def load():
            loads.append(shift)
            return NetworkPolicy(shift=shift)

        return load

    def evaluate(*shifts, **options):
        models = [(f"step {shift}", loader(shift)) for shift in shifts]
        return evaluate_policies(models, "pusht", "keypoints", tmp_path, **(SHORT | options))

    record, rollouts = evaluate(0.0, 40.0)
    assert json.loads((tmp_path / "evaluation.json").read_text()) == record
    assert record["seeds"] == [100_000, 100_001, 100_002]
    assert (record["max_steps"], record["noise_seed"], len(rollouts)) == (12, 0, 3)
    first, second = record["checkpoints"]
    assert first["weights"] != second["weights"]
    assert second["scores"] == [rollout.score for rollout in rollouts]
    assert (second["horizon"], second["observed"], second["executed"]) == (16, 2, 8)
    assert [row["batch"] for row in second["latency"]] == [1, 3]
    assert record["mean"] == pytest.approx(np.mean([first["mean"], second["mean"]]))
    assert {"evaluator", "hardware", "torch", "command", "standard_error"} <= record.keys()
    assert second["environment"]["device"] == "cpu"
    assert second["simulator"] == {name: version(name) for name in ("gym-pusht", "pymunk")}
    again, none = evaluate(40.0, 0.0)
    assert again["checkpoints"] == [second, first]
    assert not none
    other, simulated = evaluate(40.0, seed=1)  # other noise: nothing of the file applies
    assert (other["noise_seed"], len(other["checkpoints"])) == (1, 1)
    assert not np.array_equal(simulated[0].actions, rollouts[0].actions)
    assert len(loads) == 5


def test_schedulers_do_not_share_results(tmp_path):
    pytest.importorskip("gym_pusht")
    pytest.importorskip("diffusers")
    network = save_small_policy(tmp_path / "diffusion", method="diffusion")

    def evaluate(**options):
        policy = DriftingPolicy.from_pretrained(network, **options)
        models = [("diffusion", lambda: policy)]
        return evaluate_policies(models, "pusht", "keypoints", tmp_path, latency=False, **SHORT)[0]

    ddim = evaluate(scheduler="ddim", calls=3)
    ddpm = evaluate(scheduler="ddpm", calls=3)
    assert [record["checkpoints"][0]["weights"].split(", ")[1:] for record in (ddim, ddpm)] == [
        ["ddim", "3 calls"],
        ["ddpm", "3 calls"],
    ]


def test_the_table_shows_errors_and_calls():
    latency = {
        "batch": 1,
        "milliseconds": 2.5,
        "network_calls": 1,
        "actions_per_second": 3200.0,
        "device": "cpu",
    }
    record = {
        "task": "pusht",
        "observe": "keypoints",
        "mean": 0.91234,
        "standard_error": 0.0123,
        "success_rate": 0.5,
        "seeds": [100_000, 100_001],
        "checkpoints": [{}, {"latency": [latency]}],
    }
    head, line, row = score_table([("drifting", record)]).splitlines()
    assert head.count("|") == line.count("|") == row.count("|")
    assert row == (
        "| drifting | pusht, keypoints | 0.912 ± 0.012 | 0.50 | 2 "
        "| 100000 to 100001 | 1 | 2.5 | 3,200 | cpu |"
    )


def test_one_seed_is_one():
    record = {"mean": 0.5, "standard_error": None, "success_rate": 0.0, "seeds": [3], "checkpoints": [{}]}
    assert _summary("PushT", record) == "PushT: score 0.500, success 0%, 1 seed"


def test_best_and_worst_episodes():
    rollouts = [
        Rollout(i, s, False, np.zeros((1, 2)), np.array([s])) for i, s in enumerate([0.3, 0.9, 0.1, 1.0])
    ]
    assert [r.seed for r in choose_rollouts(rollouts, 1)] == [3, 2]
    assert [r.seed for r in choose_rollouts(rollouts, 2)] == [3, 1, 0, 2]
    assert [r.seed for r in choose_rollouts(rollouts[:1], 2)] == [0]
    assert choose_rollouts(rollouts, 0) == []


def test_files_of_an_evaluation(tmp_path, capsys):
    pytest.importorskip("gym_pusht")
    imageio = pytest.importorskip("imageio.v2")
    record = run_policy_evaluation(["random"], LoadOptions("pusht"), tmp_path, videos=1, stills=1, **SHORT)
    assert {path.name for path in tmp_path.iterdir()} == {
        "evaluation.json",
        "table.md",
        "stills.png",
        "videos",
    }
    videos = list((tmp_path / "videos").iterdir())
    assert len(videos) == 2
    assert {video.name for video in videos} <= {f"pusht-{seed}-failure.mp4" for seed in record["seeds"]}
    frames = np.stack(list(imageio.get_reader(videos[0]).iter_data()))
    assert frames.shape == (13 + 7, 384, 384, 3)  # the first state, 12 steps, the last one held
    assert np.abs(frames[0].astype(int) - frames[12]).max() > 100
    with Image.open(tmp_path / "stills.png") as stills:
        assert stills.width > 6 * 192
    assert "PushT: score" in capsys.readouterr().out


def test_rollout_command_is_deterministic(here, tmp_path):
    pytest.importorskip("gym_pusht")
    words = ("policy", "rollout", "random", "--task", "pusht", "--seed", 3, "--max-steps", 10)
    first, second = here(*words), here(*words, "--stills", tmp_path / "a.png")
    assert first.returncode == second.returncode == 0
    assert first.stdout.strip() == second.stdout.splitlines()[0]
    assert first.stdout.startswith("PushT, seed 3: score 0.")
    assert "no success in 10 steps (that needs more than 95% of the target covered)" in first.stdout
    assert (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("rollout", "random"), "name the task with --task"),
        (("rollout", "random", "--task", "push"), "did you mean 'pusht'"),
        (("rollout", "random", "--task", "pusht", "--video", "a.gif"), "ends in .mp4"),
        (("rollout", "random", "--task", "pusht", "--stills", "a.jpg"), "ends in .png"),
        (("eval", "random", "lift", "--checkpoints", "3"), "is for one run"),
        (("eval", "nowhere", "--checkpoints", "3"), "nowhere has 0 checkpoints"),
        (("collect", "pusht"), "choose from lift"),
        (("collect", "lift", "--out", "a.zarr"), "ends in .hdf5"),
    ],
)
def test_bad_commands_give_one_line(here, words, message):
    pytest.importorskip("h5py")
    done = here("policy", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_seed": -5}, "first_seed=-5 must be from 0 to 4,294,967,293"),
        ({"first_seed": 2**32 - 1}, "first_seed=4294967295 must be from 0 to 4,294,967,293"),
        ({"seed": -1}, "seed=-1 must be an integer from 0"),
        ({"videos": -1}, "videos=-1 must be at least 0"),
        ({"stills": -1}, "stills=-1 must be at least 0"),
    ],
)
def test_numbers_of_an_evaluation_are_checked_before_it(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        run_policy_evaluation(["random"], LoadOptions("pusht"), tmp_path, **{"videos": 0} | SHORT | options)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_seeds_of_the_simulators_have_32_bits(seed):
    with pytest.raises(InputError, match=r"seed of an episode=.* must be from 0 to 4,294,967,295"):
        run_rollouts(RandomPolicy("pusht"), "pusht", "keypoints", [seed], processes=1)
    with pytest.raises(InputError, match=r"seed=.* must be from 0 to 4,294,967,295"):
        run_single_rollout("random", LoadOptions("pusht"), seed=seed)


def test_the_task_follows_from_the_observations():
    def policy(**shapes):
        observations = {f"observation.{key}": shape for key, shape in shapes.items()}
        return types.SimpleNamespace(network=types.SimpleNamespace(observations=observations))

    assert [
        part if isinstance(part, str) else part.name for part in choose_task(policy(state=(20,)), None)
    ] == [
        "pusht",
        "keypoints",
    ]
    assert choose_task(policy(state=[2], image=[96, 96, 3]), None)[1] == "image"
    assert choose_task(policy(state=(19,)), "lift")[1] == "state"
    with pytest.raises(InputError, match="lift offers state"):
        choose_task(policy(state=(20,)), "lift")
    with pytest.raises(InputError, match="as in no task"):
        choose_task(policy(state=(21,)), None)
    cameras = {"images.agentview": (84, 84, 3), "images.robot0_eye_in_hand": (84, 84, 3)}
    with pytest.raises(InputError, match="as in lift or can"):
        choose_task(policy(state=(9,), **cameras), None)
    trained = policy(state=(9,), **cameras)
    trained.source = {"environment": "can"}
    assert choose_task(trained, None)[0].name == "can"
    assert choose_task(RandomPolicy("pusht"), "pusht")[1] == "keypoints"


def test_the_last_checkpoints_of_a_run(tmp_path, monkeypatch):
    from safetensors.torch import save_file

    monkeypatch.setattr(policy_loading, "load_policy", lambda name, options: NetworkPolicy())
    for step in (10, 20, 30):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        save_file(
            {"ema/0.99/shift": torch.full((2,), float(step)), "model/shift": torch.zeros(2)},
            folder / "state.safetensors",
        )
    found = policies_of_run(str(tmp_path), 2, LoadOptions())
    assert [name for name, _ in found] == [f"{tmp_path}, step 20", f"{tmp_path}, step 30"]
    assert [load().network.shift[0].item() for _, load in found] == [20, 30]
    with pytest.raises(InputError, match=r"has 3 checkpoints, 5 are asked for.*output.keep_last=5"):
        policies_of_run(str(tmp_path), 5, LoadOptions())
    (tmp_path / "checkpoints" / "step-00000030" / "state.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot be read"):
        found[1][1]()


@pytest.fixture
def saved(tmp_path):
    """The folder of a small policy of PushT with random weights."""
    return save_small_policy(tmp_path / "policy")


def test_a_saved_policy_is_scored_and_watched(here, saved, tmp_path):
    pytest.importorskip("gym_pusht")
    words = ("policy", "rollout", saved, "--seed", 3, "--max-steps", 20, "--device", "cpu")
    first, second = here(*words), here(*words)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    sizes = ("--episodes", 2, "--max-steps", 9, "--processes", 1, "--videos", 0, "--stills", 0)
    done = here("policy", "eval", saved, "--out", tmp_path / "eval", "--device", "cpu", *sizes)
    assert done.returncode == 0, done.stderr
    assert "1 network call (cpu" in done.stdout
    record = json.loads((tmp_path / "eval" / "evaluation.json").read_text())
    assert (record["task"], record["observe"], record["seeds"]) == ("pusht", "keypoints", [100_000, 100_001])
    assert record["checkpoints"][0]["latency"][0]["network_calls"] == 1
    assert record["checkpoints"][0]["steps"] == [9, 9]
    wrong = here("policy", "rollout", saved, "--task", "lift")
    assert wrong.returncode == 2
    assert "lift offers state" in wrong.stderr


def test_the_noise_of_an_episode_does_not_depend_on_the_others(saved):
    pytest.importorskip("gym_pusht")
    policy = DriftingPolicy.from_pretrained(saved)
    options = {"max_steps": 16, "processes": 1}
    (alone,) = run_rollouts(policy, "pusht", "keypoints", [3], **options)
    beside = run_rollouts(policy, "pusht", "keypoints", [1, 2, 3], **options)[2]
    # Equal up to the rounding of a batch.
    assert np.abs(alone.actions - beside.actions).max() < 0.1
