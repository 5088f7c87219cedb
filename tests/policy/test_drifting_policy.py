"""DriftingPolicy: normalization, receding horizon, seeds, samplers, saved folders."""

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.generators import PolicyNetwork
from driftgen.policy.chunk_samplers import TRAINING_STEPS, DiffusionSampler, make_sampler
from driftgen.policy.episodes import Episodes
from driftgen.policy.processor import MinMax, Processor, center_crop, measure_statistics

STATE = "observation.state"
STATISTICS = {"action": {"low": [0.0, -1.0], "high": [512.0, 1.0]}, STATE: {"low": [0.0], "high": [10.0]}}


def build(method="drifting", **options):
    torch.manual_seed(0)
    network = PolicyNetwork(
        {STATE: (1,)}, 2, STATISTICS, horizon=8, observed=2, executed=3, method=method,
        options={"widths": [16], "groups": 4, "kernel_size": 3}, **options,
    )  # fmt: skip
    return dg.DriftingPolicy(network)


def test_min_max_maps_the_range_to_one_and_constants_to_zero():
    scale = MinMax([0.0, 5.0, -2.0], [512.0, 5.0, 2.0])
    values = torch.tensor([[0.0, 5.0, -2.0], [512.0, 5.00001, 2.0], [256.0, 6.0, 3.0]])
    normal = scale.normalize(values)
    torch.testing.assert_close(normal[:, 0], torch.tensor([-1.0, 1.0, 0.0]))
    torch.testing.assert_close(normal[:, 1], torch.tensor([0.0, 1e-5, 1.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(normal[:, 2], torch.tensor([-1.0, 1.0, 1.5]))
    torch.testing.assert_close(scale.restore(normal), values)


def test_statistics_are_those_of_states_and_actions():
    images = np.zeros((4, 6, 6, 3), np.uint8)
    states = np.array([[1, 5], [2, 6], [0, 9], [4, 5]])
    episodes = Episodes({STATE: states, "observation.image": images}, np.arange(4.0)[:, None], np.array([4]))
    assert measure_statistics(episodes) == {
        "action": {"low": [0.0], "high": [3.0]},
        STATE: {"low": [0.0, 5.0], "high": [4.0, 9.0]},
    }


def test_actions_have_the_units_of_the_environment():
    policy = build()
    noise = policy.network.sample_noise(2)
    states = np.array([[[2.0], [3.0]], [[4.0], [10.0]]])
    normalized = torch.tensor([[[-0.6], [-0.4]], [[-0.2], [1.0]]])
    with torch.no_grad():
        chunks = policy.network(noise, {STATE: normalized})
    expected = chunks * torch.tensor([256.0, 1.0]) + torch.tensor([256.0, 0.0])
    np.testing.assert_allclose(policy.predict({STATE: states}, noise), expected.numpy(), rtol=1e-5, atol=1e-3)


def test_receding_horizon_executes_three_actions_of_each_chunk():
    policy = build()
    states = np.arange(7.0)[:, None]
    policy.reset(seed=5)
    actions = np.stack([policy.select_action({STATE: s, "other": 0}) for s in states])
    random = torch.Generator().manual_seed(5)
    chunks = []
    for now in (0, 3, 6):  # history of the latest two; the first observation stands for the one before it
        history = states[[max(now - 1, 0), now]][None]
        chunks.append(policy.predict({STATE: history}, policy.network.sample_noise(1, random))[0, 1:4])
    np.testing.assert_array_equal(actions, np.concatenate(chunks)[:7])
    policy.reset(seed=5)
    np.testing.assert_array_equal(policy.select_action({STATE: states[0]}), actions[0])


def test_a_seed_gives_the_same_chunk_in_any_batch():
    policy = build()
    one, many = (policy.predict({STATE: np.full((n, 2, 1), 3.0)}, seed=7) for n in (1, 4))
    np.testing.assert_allclose(one[0], many[0], rtol=1e-5, atol=1e-3)
    assert np.abs(many[0] - many[1]).max() > 0.01


@pytest.mark.parametrize(("method", "options", "calls"), [
    ("drifting", {}, 1),
    ("regression", {}, 1),
    ("diffusion", {}, 10),
    ("diffusion", {"scheduler": "ddpm", "calls": 20}, 20),
])  # fmt: skip
def test_saved_policies_act_as_before(tmp_path, method, options, calls):
    policy = build(method)
    policy.sampler = make_sampler(method, **options)
    seen = []
    policy.network.generator.register_forward_hook(lambda *args: seen.append(1))
    states = np.random.default_rng(0).uniform(0, 10, (3, 2, 1))
    before = policy.predict({STATE: states}, seed=1)
    assert len(seen) == policy.calls == calls
    policy.save_pretrained(tmp_path / "p")
    loaded = dg.DriftingPolicy.from_pretrained(tmp_path / "p", **options)
    np.testing.assert_array_equal(loaded.predict({STATE: states}, seed=1), before)
    same = loaded.predict({STATE: states}, seed=2)
    assert (np.abs(same - before).max() == 0) == (method == "regression")


def test_ddim_recovers_a_known_chunk():
    """A network that knows the chunk predicts its noise exactly: every step stays on the line to it."""
    chunk = torch.rand(1, 4, 2) - 0.5
    sampler = DiffusionSampler("ddim")
    encoded = []

    class Perfect(torch.nn.Module):
        def encode(self, observations):
            encoded.append(observations)
            return torch.ones(1, 2, 3)

        def forward(self, noisy, tokens, time):
            assert tokens.shape == (1, 2, 3)
            alpha = sampler.scheduler.alphas_cumprod[time][:, None, None]
            return (noisy - alpha.sqrt() * chunk) / (1 - alpha).sqrt()

    found = sampler(Perfect(), torch.randn(5, 4, 2), {"observation.state": chunk})
    assert len(encoded) == 1  # not at each of the 10 calls
    torch.testing.assert_close(found, chunk.expand(5, -1, -1), atol=1e-3, rtol=0)
    assert sampler.calls == 10
    assert TRAINING_STEPS == 100


@pytest.mark.parametrize("scheduler", ["ddim", "ddpm"])
def test_a_chunk_of_diffusion_does_not_depend_on_those_beside_it(scheduler):
    network = build("diffusion").network
    policy = dg.DriftingPolicy(network, sampler=DiffusionSampler(scheduler, 4))
    noise, states = network.sample_noise(3), np.array([[[2.0], [3.0]], [[4.0], [9.0]], [[1.0], [0.0]]])
    together = policy.predict({STATE: states}, noise)
    alone = policy.predict({STATE: states[1:2]}, noise[1:2])
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(policy.predict({STATE: states}, noise), together)


def test_a_refused_observation_does_not_enter_the_history():
    policy, untouched = build(), build()
    for bad in ({}, {STATE: np.zeros(3)}, {STATE: np.array([np.nan])}, {STATE: np.array(["a"])}):
        for start in (np.array([1.0]), None):
            policy.reset(seed=2)
            untouched.reset(seed=2)
            if start is not None:
                np.testing.assert_array_equal(
                    policy.select_action({STATE: start}), untouched.select_action({STATE: start})
                )
            with pytest.raises(dg.InputError):
                policy.select_action(bad)
            for value in (3.0, 4.0, 5.0):
                step = {STATE: np.array([value])}
                np.testing.assert_array_equal(policy.select_action(step), untouched.select_action(step))


def test_images_are_cropped_and_accepted_as_lerobot_has_them():
    processor = Processor({"observation.image": (4, 6, 3)}, {"action": STATISTICS["action"]}, (2, 4))
    images = torch.randint(256, (1, 2, 4, 6, 3), dtype=torch.uint8)
    cropped = processor.prepare({"observation.image": images}, torch.device("cpu"))["observation.image"]
    assert torch.equal(cropped, images[:, :, 1:3, 1:5])
    floats = images.movedim(-1, 2) / 255
    same = processor.prepare({"observation.image": floats}, torch.device("cpu"))["observation.image"]
    assert torch.equal(same, cropped)
    assert torch.equal(center_crop(images, None), images)
    for wrong in (floats * 255, floats * 2 - 1, floats * np.nan):
        with pytest.raises(
            dg.InputError, match=r"observation.image has values .*, expected 0 to 1, or bytes"
        ):
            processor.prepare({"observation.image": wrong}, torch.device("cpu"))


def test_wrong_observations_are_one_line(tmp_path):
    policy = build()
    for observations, message in (
        (
            {"state": np.zeros((1, 2, 1))},
            "observation.state is missing: the policy observes observation.state",
        ),
        (
            {STATE: np.zeros((1, 2, 3))},
            r"observation.state has shape \[1, 2, 3\], expected \[batch, steps, 1\]",
        ),
        ({STATE: np.zeros((1, 3, 1))}, "has 1 histories of 3 steps, expected 1 of 2"),
    ):
        with pytest.raises(dg.InputError, match=message):
            policy.predict(observations)
    with pytest.raises(dg.InputError, match="for policies of method diffusion, this one is drifting"):
        make_sampler("drifting", "ddim")
    with pytest.raises(dg.InputError, match="calls=0 must be from 1 to 100"):
        make_sampler("diffusion", calls=0)
    dg.save_model(policy.network.generator, tmp_path / "g")
    with pytest.raises(dg.InputError, match="is a network without observations \\(UNet1D\\), not a policy"):
        dg.DriftingPolicy.from_pretrained(tmp_path / "g")
    with pytest.raises(
        dg.InputError, match=r"^digits is a generator .*, not a policy: driftgen sample digits$"
    ):
        dg.DriftingPolicy.from_pretrained("digits")
    message = "^pusht is a policy, not a generator: driftgen policy rollout pusht, or"
    with pytest.raises(dg.InputError, match=message):
        dg.DriftPipeline.from_pretrained("pusht")


def test_weights_of_half_the_size_act_in_float32(tmp_path):
    policy = build()
    policy.save_pretrained(tmp_path / "p", dtype=torch.bfloat16)
    loaded = dg.DriftingPolicy.from_pretrained(tmp_path / "p")
    states = np.full((1, 2, 1), 3.0)
    chunks = loaded.predict({STATE: states}, seed=0)
    assert chunks.dtype == np.float32
    np.testing.assert_allclose(chunks, policy.predict({STATE: states}, seed=0), atol=6)  # of 512


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["drifting", "regression"])
def test_captured_graphs_give_the_same_chunks(method):
    policy = build(method).to("cuda")
    states = {n: np.random.default_rng(n).random((n, 2, 1), np.float32) * 10 for n in (1, 3, 4)}
    want = {n: policy.predict({STATE: given}, seed=n) for n, given in states.items()}
    policy.capture(max_graphs=2)
    for n in (1, 3, 4, 1):
        np.testing.assert_array_equal(policy.predict({STATE: states[n]}, seed=n), want[n])
    assert len(policy._graphed.captured) == 2
    policy.to("cuda")
    assert not policy._graphed.captured


def test_capturing_changes_nothing_on_a_cpu():
    policy, states = build(), {STATE: np.full((3, 2, 1), 2.0)}
    want = policy.predict(states, seed=0)
    np.testing.assert_array_equal(policy.capture().predict(states, seed=0), want)
    assert build("diffusion").capture()._graphed is None
