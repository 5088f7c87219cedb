"""Training of policies: the same loop, draws, groups, baselines, recipes and commands."""

import json
import signal
import traceback
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

import driftgen as dg
from driftgen.policy.episodes import Episodes
from driftgen.support.distributed import Distributed
from driftgen.training.build import Parts
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import Optimizer, Output
from driftgen.training.policy_config import ImageObservations, Joint, PolicyBatch, PolicyConfig
from driftgen.training.policy_data import ChunkDraws, nearest_windows
from driftgen.training.policy_objectives import DriftingObjective
from driftgen.training.policy_task import PolicyTraining, chunk_scores, train_policy
from driftgen.training.recipes import load_recipe, recipe_names
from tests.support.fork_server import start_code
from tests.support.runs import Silent, final

PACKAGE = Path(dg.__file__).parent
CPU = Distributed.start("cpu")
OPTIONS = {
    "data": {"kind": "two-ways"},
    "horizon": 8,
    "executed": 4,
    "generator": {"options": {"widths": [16], "groups": 4, "kernel_size": 3}},
    "batch": PolicyBatch(observations=6, generated=4),
    "optim": Optimizer(lr=1e-3, warmup=2, steps=4),
    "output": Output(metrics_every=2, samples_every=10, checkpoint_every=2),
    "ema": (0.9, 0.99),
}
KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from driftgen.training.policy_objectives import DriftingObjective
from driftgen.training.policy_task import PolicyTraining, train_policy
from driftgen.support.distributed import Distributed
from driftgen.training.policy_config import PolicyConfig
from tests.support.runs import Silent
torch.set_num_threads(int(sys.argv[2]))
compute = PolicyTraining.compute_gradient
def killed(self, step):
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(self, step)
PolicyTraining.compute_gradient = killed
config = PolicyConfig.model_validate_json(sys.argv[3])
train_policy(config, Path(sys.argv[1]), Distributed.start("cpu"), Silent())
"""


@pytest.fixture(autouse=True, scope="module")
def _libraries():
    """Import the libraries of a run before the first test is timed."""
    import_module("matplotlib.pyplot")
    import_module("torch._dynamo")  # an optimizer imports it


def config(**changes):
    return PolicyConfig(**{**OPTIONS, **changes})


def train(folder, *, override=False, **changes):
    view = Silent()
    done = train_policy(config(**changes), folder, CPU, view, name="toy", override=override)
    return done, view


def with_images(steps=20):
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (steps, 12, 14, 3), dtype=np.uint8)
    states = random.normal(size=(steps, 2))
    observations = {"observation.image": images, "observation.state": states}
    return Episodes(observations, random.normal(size=(steps, 2)), np.array([steps // 2, steps]))


SLOW = pytest.param("diffusion", marks=pytest.mark.slow)  # importing diffusers takes seconds


@pytest.mark.parametrize("method", ["drifting", "regression", SLOW])
def test_policies_train_in_the_loop(tmp_path, method):
    folder = tmp_path / "r"
    done, view = train(folder, method=method)
    assert done
    header, *rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert header["header"]["task"] == "policy"
    assert [row["step"] for row in rows] == [2, 4]
    assert rows[-1].keys() >= {"loss", "gradient_norm", "chunk_error", "chunk_spread", "energy_score"}
    assert ("drift" in rows[-1]) == (method == "drifting")
    assert sorted(p.name for p in (folder / "samples").iterdir()) == [
        f"step-{step:07d}.png" for step in (0, 4)
    ]
    assert not view.said
    policy = dg.DriftingPolicy.from_pretrained(folder, weights="ema-0.99")
    assert policy.source == {"recipe": "toy", "method": method, "step": 4, "ema": "0.99"}
    saved, averaged = policy.network.state_dict(), final(folder)
    assert all(torch.equal(value, averaged[f"ema/0.99/{name}"]) for name, value in saved.items())
    assert policy.predict({"observation.state": np.zeros((3, 2, 2))}, seed=0).shape == (3, 8, 2)


def test_a_policy_has_no_diversity():
    """Its reference would be the chunks of a few near observations."""
    task = PolicyTraining(config(batch=PolicyBatch(observations=6, generated=4, positives=2)), CPU)
    task.compute_gradient(0)
    row = task.measure(task.network)
    assert row.keys() >= {"spread", "chunk_spread", "energy_score"}
    assert "diversity" not in row


@pytest.mark.slow
def test_resumed_to_the_bit(tmp_path):
    short = Optimizer(lr=1e-3, warmup=2, steps=2)
    quiet = Output(metrics_every=100, samples_every=100, checkpoint_every=100)
    train(tmp_path / "straight", output=quiet)
    train(tmp_path / "stopped", output=quiet, optim=short)
    _, view = train(tmp_path / "stopped", output=quiet, override=True)
    assert view.said == ["resumed after step 2"]
    straight, resumed = final(tmp_path / "straight"), final(tmp_path / "stopped")
    assert all(torch.equal(straight[k], resumed[k]) for k in straight)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["drifting", "diffusion"])
def test_killed_and_resumed_to_the_bit(tmp_path, method):
    train(tmp_path / "straight", method=method)
    text = config(method=method).model_dump_json()
    killed = start_code(KILLED, tmp_path / "killed", torch.get_num_threads(), text)
    assert killed.wait() == -signal.SIGKILL
    assert Checkpoints(tmp_path / "killed" / "checkpoints").load().step == 2
    _, view = train(tmp_path / "killed", method=method)
    assert view.said == ["resumed after step 2"]
    straight, resumed = final(tmp_path / "straight"), final(tmp_path / "killed")
    assert straight.keys() == resumed.keys()
    assert all(torch.equal(straight[k], resumed[k]) for k in straight)


def gradient(**changes):
    task = PolicyTraining(config(**changes), CPU)
    loss = task.compute_gradient(0)
    return loss, torch.cat([p.grad.flatten() for p in task.model.parameters()])


def test_micro_batches_give_the_gradient_of_the_whole():
    whole, parts = (gradient(batch=PolicyBatch(observations=6, generated=4, micro=m)) for m in (1, 3))
    torch.testing.assert_close(parts[1], whole[1], rtol=1e-4, atol=1e-6)


def test_the_step_is_the_drifting_loss_of_each_observation():
    task = PolicyTraining(config(), CPU)
    inputs = task.draw(3)
    chunks = task.network(inputs.noise, inputs.conditions[0]).flatten(1).unflatten(0, (6, 4))
    expected = dg.DriftingLoss()(chunks, inputs.positives.flatten(2))
    assert inputs.positives.shape == (6, 1, 8, 2)
    torch.testing.assert_close(task.compute_gradient(3), expected.loss.detach())


@pytest.mark.parametrize(("count", "text"), [(1, "1 episode, "), (2, "2 episodes, ")])
def test_the_summary_counts_episodes(count, text):
    data = OPTIONS["data"] | {"episodes": count}
    assert PolicyTraining(config(data=data), CPU).describe()["data"].startswith(text)


def test_bfloat16_networks_compare_chunks_in_float32():
    task = PolicyTraining(config(precision="bfloat16"), CPU)
    task.compute_gradient(0)
    assert {t.dtype for t in (task.last.generated["global"], task.last.positives["global"])} == {
        torch.float32
    }
    assert torch.equal(task.last.positives["global"].squeeze(2), task.draw(0).positives.flatten(2))


def test_one_large_group_is_the_loss_of_the_joint_samples():
    task = PolicyTraining(config(joint=Joint(groups=2, weight=0.5)), CPU)
    inputs = task.draw(3)
    states = inputs.conditions[0]["observation.state"].flatten(1)  # 2 x 2 numbers, a chunk has 16
    chunks = task.network(inputs.noise, inputs.conditions[0]).flatten(1)
    samples = torch.cat([chunks, states.repeat_interleave(4, 0)], dim=1).unflatten(0, (2, 12))
    real = torch.cat([inputs.positives[:, 0].flatten(1), states], dim=1).unflatten(0, (2, 3))
    # weight 0.5 · sqrt(16 / 4) = 1
    expected = dg.DriftingLoss()(samples, real)
    torch.testing.assert_close(task.compute_gradient(3), expected.loss.detach())


def test_joint_groups_are_those_of_all_processes():
    second = Distributed(1, 2, torch.device("cpu"), None)
    chosen = config(joint=Joint(groups=6), batch=PolicyBatch(observations=12, generated=4))
    assert DriftingObjective(torch.nn.Identity(), chosen, second).step.groups == 3
    for groups in (1, 3):
        chosen = config(joint=Joint(groups=groups))
        with pytest.raises(dg.InputError, match=f"joint.groups={groups} must be a multiple of the number of"):
            DriftingObjective(torch.nn.Identity(), chosen, second)


def test_regression_and_diffusion_are_their_closed_forms():
    task = PolicyTraining(config(method="regression"), CPU)
    inputs = task.draw(0)
    predicted = task.network(torch.zeros(6, 8, 2), inputs.conditions[0])
    torch.testing.assert_close(
        task.compute_gradient(0), F.mse_loss(predicted, inputs.positives[:, 0]).detach()
    )
    from diffusers import DDPMScheduler

    task = PolicyTraining(config(method="diffusion"), CPU)
    inputs = task.draw(0)
    observations, time = inputs.conditions
    scheduler = DDPMScheduler(100, beta_schedule="squaredcos_cap_v2")
    noisy = scheduler.add_noise(inputs.positives[:, 0], inputs.noise, time)
    expected = F.mse_loss(task.network(noisy, observations, time), inputs.noise)
    torch.testing.assert_close(task.compute_gradient(0), expected.detach())


def test_windows_of_an_epoch_come_once_each():
    draws = ChunkDraws(config(), with_states(30), torch.device("cpu"))
    n = len(draws.training)
    seen = torch.cat([draws.indices(step) for step in range(2 * n)])
    for epoch in range(5):
        assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))
    assert seen[:n].tolist() != seen[n : 2 * n].tolist()


def with_states(steps):
    random = np.random.default_rng(1)
    states = random.normal(size=(steps, 3))
    return Episodes({"observation.state": states}, states[:, :2], np.array([steps // 2, steps]))


def test_draws_are_the_normalized_windows():
    episodes = with_states(40)
    draws = ChunkDraws(config(), episodes, torch.device("cpu"))
    observations, positives = draws.draw(2, slice(1, 4), seed=0)
    chosen = draws.indices(2)[1:4].numpy()
    seen, actions = draws.training.load(chosen)
    low, high = episodes.actions.min(0), episodes.actions.max(0)
    expected = 2 * (actions - low) / (high - low) - 1
    np.testing.assert_allclose(positives[:, 0].numpy(), expected, atol=1e-5)
    assert positives.abs().max() <= 1 + 1e-5
    prepared = draws.processor.prepare(seen, torch.device("cpu"))
    torch.testing.assert_close(observations["observation.state"], prepared["observation.state"])


def test_nearest_windows_are_those_of_brute_force():
    torch.manual_seed(0)
    x = torch.randn(50, 4)
    x[7] = x[3]  # a duplicate comes after the window itself
    found = nearest_windows(x, 3)
    assert found[:, 0].tolist() == list(range(50))
    assert found[3, 1] == 7
    assert found[7, 1] == 3
    order = (x[:, None] - x[None]).square().sum(-1).argsort(1)
    assert all(set(found[i].tolist()) == set(order[i, :3].tolist()) for i in range(50))
    with pytest.raises(dg.InputError, match=r"batch.positives=51, but there are 50 windows"):
        nearest_windows(x, 51)


def test_positives_of_near_observations():
    batch = PolicyBatch(observations=6, generated=4, positives=3)
    draws = ChunkDraws(config(batch=batch), with_states(60), torch.device("cpu"))
    _, positives = draws.draw(0, slice(0, 6), seed=0)
    single = ChunkDraws(config(), with_states(60), torch.device("cpu")).draw(0, slice(0, 6), seed=0)[1]
    assert positives.shape == (6, 3, 8, 2)
    assert torch.equal(positives[:, :1], single)


def test_random_crops_are_parts_of_the_images():
    changes = {
        "images": ImageObservations(crop=(10, 11), widths=(16,), keypoints=4),
        "horizon": 4,
        "executed": 2,
    }
    episodes = with_images()
    draws = ChunkDraws(config(**changes), episodes, torch.device("cpu"))
    (first, _), (again, _), (other, _) = (draws.draw(0, slice(0, 6), seed) for seed in (1, 1, 2))
    crops = first["observation.image"]
    assert crops.shape == (6, 2, 10, 11, 3)
    assert torch.equal(crops, again["observation.image"])
    assert not torch.equal(crops, other["observation.image"])
    whole = torch.from_numpy(draws.training.load(draws.indices(0).numpy())[0]["observation.image"])
    for crop, images in zip(crops, whole, strict=True):
        parts = [images[:, top : top + 10, left : left + 11] for top in range(3) for left in range(4)]
        assert any(torch.equal(crop, part) for part in parts)


def test_images_train(tmp_path):
    changes = config(
        images=ImageObservations(crop=(10, 11), widths=(16,), keypoints=4),
        generator={"kind": "transformer", "options": {"hidden_size": 16, "depth": 1, "heads": 2}},
        optim=Optimizer(steps=3, warmup=1),
    )
    run = dg.train(changes, tmp_path / "r", data=with_images(40), device="cpu")
    assert run.complete
    assert run.config.data.kind == "memory"
    policy = run.policy()
    history = {key: values[None, :2] for key, values in with_images().observations.items()}
    assert policy.predict(history).shape == (1, 8, 2)
    with pytest.raises(dg.InputError, match="is a policy, not a generator: driftgen policy rollout"):
        run.pipeline()


def test_scores_are_their_closed_forms():
    actions = torch.zeros(1, 2, 2)
    ring = torch.tensor([[[[1.0, 0], [0, 0]], [[-1.0, 0], [0, 0]]]])  # two chunks at distance 1 and 2 apart
    scores = chunk_scores(ring, actions)
    assert scores == pytest.approx({"chunk_error": 0.5, "chunk_spread": 1.0, "energy_score": 0.0})
    assert chunk_scores(actions[:, None].expand(1, 4, 2, 2), actions)["energy_score"] == 0


def test_distances_far_from_zero():
    random = torch.Generator().manual_seed(0)
    points = (torch.randn(40, 2, generator=random) * 64).round() / 64
    assert torch.equal(nearest_windows(points + 2.0**14, 3), nearest_windows(points, 3))
    chunks, actions = points.view(1, 40, 1, 2), points[None, :1]
    near, far = (chunk_scores(chunks + t, actions + t) for t in (0, 2.0**14))
    assert far == pytest.approx(near, rel=1e-5)


def test_recipes_of_policies():
    names = [r.name for r in recipe_names() if r.task == "policy"]
    trained = ["lift-state", "lift-state-cpu", "pusht-image", "pusht-state", "pusht-state-cpu"]
    assert names == [*trained, "two-ways"]
    for name in names:
        loaded = load_recipe(name, task="train")
        assert isinstance(loaded, PolicyConfig)
        assert loaded.about
        assert loaded.environment
    with pytest.raises(
        dg.InputError, match="digits is a recipe for driftgen train: run driftgen train digits"
    ):
        load_recipe("digits", task="policy train")
    with pytest.raises(dg.InputError, match="run driftgen policy train pusht-state"):
        load_recipe("pusht-state", task="pretrain")


def test_train_by_the_name_of_a_recipe(tmp_path):
    changes = {"optim.steps": 1, "batch": {"observations": 2, "generated": 2}}
    run = dg.train("two-ways", tmp_path / "r", device="cpu", **changes)
    assert run.complete
    assert run.report.is_file()
    assert "recipe two-ways" in run.report.read_text()
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["task"] == "policy"
    with pytest.raises(dg.InputError, match=r"data is a list: pass driftgen\.policy\.episodes\.Episodes"):
        dg.train("two-ways", tmp_path / "q", data=[1], device="cpu")
    with pytest.raises(dg.InputError, match=r"data.path is not set: give the demonstrations"):
        dg.train("pusht-state", tmp_path / "p", device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executed": 8}, "executed must be 1 to 7"),
        ({"observed": 9}, "observed must not be above horizon"),
        ({"joint": {"groups": 4}}, "joint.groups must divide batch.observations"),
        ({"generator": {"kind": "dit"}}, "generator.kind='dit' is not known"),
        ({"output": {"eval_every": 10}}, "driftgen policy eval"),
    ],
)
def test_bad_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_neighbors_and_joint_groups_need_states():
    parts = Parts(episodes=with_images())
    for changes in ({"batch": PolicyBatch(observations=6, positives=2)}, {"joint": Joint(groups=1)}):
        chosen = config(data={"kind": "memory"}, horizon=4, executed=2, **changes)
        with pytest.raises(dg.InputError, match="observations have images, but"):
            PolicyTraining(chosen, CPU, parts=parts)


class _HostReads(TorchDispatchMode):
    """Records who reads a value on the host, which a CUDA graph cannot capture."""

    def __init__(self):
        super().__init__()
        self.callers = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(
            word in str(function) for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")
        ):
            frames = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(PACKAGE)]
            self.callers.append(f"{Path(frames[-1].filename).stem}.{frames[-1].name}")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes",
    [{}, {"batch": PolicyBatch(observations=6, generated=4, positives=2)}, {"method": "regression"}],
)
def test_a_step_reads_nothing_on_the_host(changes):
    """Except for checks of scale, range and dtype, which the loss makes on a CPU only."""
    task = PolicyTraining(config(**changes), CPU)
    inputs = task.draw(0)
    with _HostReads() as reads:
        task.compute(inputs)
        task.draw(1)
    checks = {"loss.check_scale", "loss.forward", "eager._drift_dtype", "field.needs_float64"}
    assert set(reads.callers) <= checks
