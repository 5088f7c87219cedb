"""A generator in small shards of bfloat16, and training that continues from it."""

import json

import pytest
import torch

import driftgen as dg
from driftgen.errors import InputError
from driftgen.generators import UNet2D
from driftgen.generators.policy_network import PolicyNetwork
from driftgen.policy.drifting_policy import DriftingPolicy
from driftgen.support.distributed import Distributed
from driftgen.training.model_shards import save_shards
from driftgen.training.trainer import train
from tests.support.runs import Silent, config, final, run


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    run(folder / "run", "optim.steps=8", "ema=[0.9]")
    return save_shards(folder / "run", folder / "shards", max_shard_size="10KB")


def test_shards_hold_the_average_in_bfloat16(shards):
    files = sorted(shards.glob("model-*.safetensors"))
    assert len(files) > 2
    saved, average = dg.load_model(shards), dg.load_model(shards.parent / "run")
    for name, value in average.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value.bfloat16())
    source = json.loads((shards / "config.json").read_text())
    assert source["class_names"] == [str(d) for d in range(10)]
    assert source["source"]["ema"] == "0.9"


def test_a_policy_in_eight_bits(tmp_path):
    statistics = {key: {"low": [-1.0] * 2, "high": [1.0] * 2} for key in ("action", "observation.state")}
    network = PolicyNetwork({"observation.state": (2,)}, 2, statistics, generator="chunk-mlp")
    policy = DriftingPolicy(network, source={"environment": "pusht"})
    saved = save_shards(policy.save_pretrained(tmp_path / "policy"), tmp_path / "shards", dtype=torch.int8)
    sizes = [sum(f.stat().st_size for f in d.glob("*.safetensors")) for d in (saved, tmp_path / "policy")]
    assert sizes[0] < 0.3 * sizes[1]
    again = DriftingPolicy.from_pretrained(saved)
    assert again.source["environment"] == "pusht"
    observations = {"observation.state": torch.rand(4, policy.observed, 2).numpy()}
    exact, rounded = (p.predict(observations, seed=0) for p in (policy, again))
    assert 0 < abs(exact - rounded).max() < 0.1


@pytest.mark.parametrize("warmup", [False, True])
def test_training_continues_from_shards(tmp_path, shards, warmup):
    """Weights and averages start from the shards, with a new optimizer and a warm-up of its own.

    θ̄ = d θ + (1 - d) θ₁ after one step: d = 0.9, or 0.1 with a warm-up of the average.
    """
    view = Silent()
    changes = [f"init={shards}", "optim.steps=1", "optim.warmup=3", "ema=[0.9]", f"ema_warmup={warmup}"]
    train(config(*changes), tmp_path / "r", Distributed.start("cpu"), view)
    assert view.said[0] == f"generator weights from {shards}"
    assert view.rows[-1]["learning_rate"] == 1e-6
    assert "warnings" not in view.rows[-1]  # an average that holds trained weights is as wanted
    tensors, start = final(tmp_path / "r"), dg.load_model(shards).state_dict()
    decay = 0.1 if warmup else 0.9
    for name, value in start.items():
        trained = tensors[f"model/{name}"]
        assert trained.dtype == torch.float32
        torch.testing.assert_close(trained, value.float(), rtol=0, atol=1e-5)  # one step of 1e-6
        expected = decay * value.float() + (1 - decay) * trained
        torch.testing.assert_close(tensors[f"ema/0.9/{name}"], expected, rtol=1e-5, atol=1e-8)
    assert any(not torch.equal(tensors[f"model/{n}"], v.float()) for n, v in start.items())
    assert all(float(v) == 1 for n, v in tensors.items() if n.endswith("/step"))


def test_wrong_input(tmp_path, shards):
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        save_shards(shards, shards.parent)
    with pytest.raises(InputError, match="max_shard_size=many: write a number of bytes"):
        save_shards(shards, tmp_path / "s", max_shard_size="many")


def test_an_encoder_in_shards(tmp_path):
    dg.save_model(dg.features.ResNetMAE(1, 8, blocks=(1, 1)), tmp_path / "m", class_names=["a"])
    folder = save_shards(tmp_path / "m", tmp_path / "s", max_shard_size="10KB", dtype=torch.float16)
    weights = dg.load_model(folder).state_dict()
    for name, value in dg.load_model(tmp_path / "m").state_dict().items():
        assert torch.equal(weights[name], value.half() if value.is_floating_point() else value)


def test_an_encoder_without_its_decoder(tmp_path, shards):
    mae = dg.features.ResNetMAE(1, 8, blocks=(1, 1))
    dg.save_model(mae, tmp_path / "m", class_names=["a"])
    small = dg.load_model(save_shards(tmp_path / "m", tmp_path / "s", dtype=None, decoder=False))
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in mae.parameters())
    x = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for name, value in mae.eval().features(x).items():
        torch.testing.assert_close(small.features(x)[name], value, rtol=0, atol=0)
    with pytest.raises(InputError, match="is no masked autoencoder"):
        save_shards(shards, tmp_path / "g", decoder=False)


@pytest.mark.slow
def test_thirty_million_parameters_fit_into_shards_of_16_mb(tmp_path, here):
    network = UNet2D.preset("32px", num_classes=10)
    count = sum(p.numel() for p in network.parameters())
    assert count > 30e6
    dg.save_model(network, tmp_path / "m")
    done = here("convert", "shards", tmp_path / "m", tmp_path / "s")
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "s").glob("model-*.safetensors"))
    assert all(path.stat().st_size <= 16e6 for path in files)
    assert sum(path.stat().st_size for path in files) < 2.01 * count
