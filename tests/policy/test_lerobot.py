"""A policy as a policy of LeRobot: registered, the same actions, trainable.

Runs against the installed lerobot, or against stand-ins with its published signatures.
"""

import importlib
import importlib.util
import inspect
import sys

import numpy as np
import pytest
import torch

from driftgen.errors import InputError
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.policy.lerobot_export import export_for_lerobot
from tests.support import lerobot_base

STATISTICS = {
    "action": {"low": [0.0, 1.0], "high": [512.0, 1.0]},  # the second one is constant
    "observation.state": {"low": [0.0, -3.0, 2.0], "high": [1.0, 5.0, 2.0]},
}
SHAPES = {"observation.state": (3,), "observation.image": (12, 10, 3)}
ADAPTER = "driftgen.policy.lerobot"


@pytest.fixture
def adapter(monkeypatch):
    if importlib.util.find_spec("lerobot") is None:
        lerobot_base.install(monkeypatch)
    yield importlib.import_module(ADAPTER)
    if isinstance(sys.modules["lerobot"], lerobot_base.StandIn):
        for name in [name for name in sys.modules if name.startswith(f"{ADAPTER}.") or name == ADAPTER]:
            sys.modules.pop(name)


@pytest.fixture
def policy():
    torch.manual_seed(0)
    network = PolicyNetwork(
        SHAPES, 2, STATISTICS, options={"widths": [8, 16]}, crop=(8, 8), image_widths=(8, 16)
    )
    return DriftingPolicy(network)


def convert(policy):
    return importlib.import_module(f"{ADAPTER}.lerobot_conversion").convert_policy(policy)


def test_lerobot_finds_the_parts_by_their_names(adapter):
    """LeRobot derives module, class and function from the name of the configuration class and its type."""
    config = adapter.DriftgenConfig
    module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    found = getattr(module, config.__name__.removesuffix("Config") + "Policy")
    assert found is adapter.DriftgenPolicy
    assert found.config_class is config
    module = importlib.import_module(config.__module__.replace("configuration_", "processor_"))
    function = getattr(module, f"make_{found.name}_pre_post_processors")
    assert list(inspect.signature(function).parameters) == ["config", "dataset_stats"]


def test_every_published_method_is_there(adapter):
    assert not adapter.DriftgenPolicy.__abstractmethods__
    assert not adapter.DriftgenConfig.__abstractmethods__
    for name in ("predict_action_chunk", "select_action"):
        parameters = inspect.signature(getattr(adapter.DriftgenPolicy, name)).parameters
        assert list(parameters)[:3] == ["self", "batch", "noise"]
        assert any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def test_actions_are_those_of_the_policy(adapter, policy):
    """20 steps, 3 chunks: history, receding horizon and normalization agree, also of constant dimensions."""
    converted, before, after = convert(policy)
    policy.reset()
    converted.reset()
    random = np.random.default_rng(0)
    for step in range(20):
        observation = {
            "observation.state": random.random(3).astype(np.float32) * 3,
            "observation.image": random.integers(0, 256, (12, 10, 3)).astype(np.uint8),
        }
        if step % policy.executed == 0:
            noise = torch.randn(1, 16, 2)
        policy.network.sample_noise = lambda n, generator=None: noise  # noqa: B023, used at once
        expected = policy.select_action(observation)
        batch = before(lerobot_base.as_lerobot(observation))
        found = after(converted.select_action(batch, noise=noise))
        np.testing.assert_allclose(found.numpy()[0], expected, rtol=1e-5, atol=1e-3)


def test_chunks_of_histories_and_of_single_steps(adapter, policy):
    converted, *_ = convert(policy)
    batch = {"observation.state": torch.rand(5, 2, 3), "observation.image": torch.rand(5, 2, 3, 12, 10)}
    assert converted.predict_action_chunk(batch).shape == (5, 8, 2)
    single = {key: value[:, 0] for key, value in batch.items()}
    repeated = {key: value[:, :1].expand(-1, 2, *value.shape[2:]) for key, value in batch.items()}
    noise = torch.randn(5, 16, 2)
    torch.testing.assert_close(
        converted.predict_action_chunk(single, noise=noise),
        converted.predict_action_chunk(repeated, noise=noise),
    )
    with pytest.raises(InputError, match=r"observation\.image is missing: the policy observes"):
        converted.predict_action_chunk({"observation.state": batch["observation.state"]})


def test_training_reads_windows_as_driftgen_does(adapter, policy):
    converted, *_ = convert(policy)
    config = converted.config
    assert config.observation_delta_indices == [-1, 0]
    assert config.action_delta_indices == list(range(-1, 15))
    assert config.get_optimizer_preset().lr == config.optimizer_lr
    batch = {
        "observation.state": torch.rand(4, 2, 3),
        "observation.image": torch.rand(4, 2, 3, 12, 10),
        "action": torch.rand(4, 16, 2),
    }
    converted.train()
    loss, facts = converted.forward(batch)
    loss.backward()
    assert facts["drift"] > 0
    assert all(torch.isfinite(p.grad).all() for p in converted.get_optim_params())
    assert any(p.grad.abs().max() > 0 for p in converted.network.encoder.parameters())


def test_baselines_act_but_are_not_trained(adapter):
    config = {"options": {"widths": [8, 16]}, "method": "regression"}
    network = PolicyNetwork({"observation.state": (3,)}, 2, STATISTICS, **config)
    converted, *_ = convert(DriftingPolicy(network))
    assert converted.select_action({"observation.state": torch.zeros(1, 3)}).shape == (1, 2)
    with pytest.raises(InputError, match="method=regression is not trained here"):
        converted.forward({})


def test_without_lerobot(monkeypatch, tmp_path, policy):
    for name in ["lerobot", *(name for name in sys.modules if name.startswith("lerobot."))]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith(f"{ADAPTER}.") or name == ADAPTER]:
        monkeypatch.delitem(sys.modules, name)
    policy.save_pretrained(tmp_path / "saved")
    with pytest.raises(
        InputError, match=r"lerobot cannot be imported .* an environment of its own, see docs/policies\.md"
    ):
        export_for_lerobot(str(tmp_path / "saved"), tmp_path / "out")
    with pytest.raises(InputError, match="saved exists and is not an empty folder"):
        export_for_lerobot(str(tmp_path / "saved"), tmp_path / "saved")
