"""Networks compiled part by part keep their results and names."""

import copy
import re

import pytest
import torch
from torch import nn

from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators import DiT, UNet2D
from driftgen.generators.image_mlp import ImageMLP
from driftgen.ops.compile import compile_parts, to_channels_last
from driftgen.support.distributed import Distributed
from driftgen.training.config import Optimizer
from driftgen.training.ema import EMA
from driftgen.training.loop import Loop
from driftgen.training.optimizer import make_optimizer
from driftgen.training.trainer import Training
from tests.support.runs import config, final, run

compiled: list[str] = []
PLAIN = torch.compile


@pytest.fixture(autouse=True)
def _without_a_backend(monkeypatch):
    """Trace the parts as always, but generate no machine code, which would take minutes."""
    compiled.clear()
    real = torch.compile

    def compile(function, **options):
        compiled.append(getattr(function, "__qualname__", type(function).__name__))
        return real(function, backend="aot_eager", dynamic=options.get("dynamic"))

    monkeypatch.setattr(torch, "compile", compile)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


NETWORKS = {
    "dit": lambda: DiT(input_size=8, patch_size=2, hidden_size=32, depth=3, num_heads=2, style_codebooks=1),
    "unet": lambda: UNet2D(
        input_size=8, widths=(16,), blocks=(1,), attention_levels=(0,), groups=8, head_size=16
    ),
    "mlp": lambda: ImageMLP(input_size=8, hidden_size=16, depth=2),
}


def randomized(network):
    """Move layers away from zero, where they would hide the layers before them."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize("name", NETWORKS)
def test_generators(name):
    network = randomized(NETWORKS[name]())
    plain = copy.deepcopy(network)
    compile_parts(network)
    to_channels_last(network)
    assert network.state_dict().keys() == plain.state_dict().keys()
    noise, labels = network.sample_noise(3), torch.tensor([0, 1, 2])
    with torch.no_grad():
        torch.testing.assert_close(
            network(noise, labels, 1.5), plain(noise, labels, 1.5), rtol=1e-4, atol=1e-5
        )
    blocks = [module for module in network.modules() if module._compiled_call_impl is not None]
    assert len(blocks) == {"dit": 5, "unet": 4, "mlp": 1}[name]
    assert not [m for m in copy.deepcopy(network).modules() if m._compiled_call_impl is not None]


@pytest.mark.slow
def test_blocks_of_a_unet_are_compiled_for_their_sizes(monkeypatch):
    """Each shape is compiled once, with static sizes."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([value for value in inputs if isinstance(value, torch.SymInt)])
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, **o: PLAIN(f, backend=backend, dynamic=o.get("dynamic")))
    network = UNet2D(
        input_size=8, widths=(16, 32, 48), blocks=(1, 1, 1), attention_levels=(2,), groups=8, head_size=16
    )
    compile_parts(network)
    for _ in range(2):
        network(network.sample_noise(2), torch.tensor([0, 1]), 1.0).sum().backward()
    # Three levels down (the middle block has the shape of the last), three up, and the final norm.
    assert len(graphs) == 3 + 3 + 1
    assert not any(graphs)


@pytest.mark.slow
def test_gradients_under_autocast():
    """Layers that run without autocast also do so in the backward pass, as without a compiler."""
    network = randomized(NETWORKS["dit"]())
    noise, labels, found = network.sample_noise(3), torch.tensor([0, 1, 2]), []
    for net in (copy.deepcopy(network), network):
        if net is network:
            compile_parts(net)
        with torch.autocast("cpu", torch.bfloat16):
            out = net(noise, labels, 1.5)
        out.float().square().sum().backward()
        found.append({name: p.grad for name, p in net.named_parameters()})
    for name, want in found[0].items():
        assert (found[1][name] - want).norm() < 1e-4 * want.norm(), name


def test_a_block_that_is_repeated_is_compiled_once():
    network = randomized(NETWORKS["dit"]())
    compile_parts(network)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        network(network.sample_noise(3), torch.tensor([0, 1, 2]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3  # condition, block, last layer


@pytest.mark.slow
def test_encoder():
    mae = randomized(ResNetMAE(in_channels=1, base_channels=32, blocks=(1,), decoder=False))
    phi = FeatureStack([(mae, {"patch_sizes": (2,)})])
    plain = copy.deepcopy(phi)
    compile_parts(phi)
    to_channels_last(phi)
    x = torch.randn(2, 1, 8, 8)
    found = []
    for net in (plain, phi):
        leaf = x.clone().requires_grad_()
        features = net.features(leaf)
        sum(v.square().sum() for v in features.values()).backward()
        found.append((features, leaf.grad))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-3, atol=1e-3)
    assert "patch_statistics" in compiled
    # The loss reads vectors per location: they are contiguous without a copy.
    assert found[1][0]["layer1"].is_contiguous()


@pytest.mark.slow
def test_ema_of_a_compiled_network():
    network = NETWORKS["dit"]()
    compile_parts(network)
    averages = EMA(network, [0.5])
    optimizer = make_optimizer(network.parameters(), Optimizer())
    before = copy.deepcopy(averages.first.state_dict())
    network(network.sample_noise(2), torch.tensor([0, 1])).square().mean().backward()
    optimizer.step()
    averages.update(network)
    for name, value in averages.first.state_dict().items():
        torch.testing.assert_close(value, (before[name] + network.state_dict()[name]) / 2)


def test_a_compiled_run_matches_the_plain_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run(tmp_path / "plain", "optim.steps=6")
    done, view = run(tmp_path / "compiled", "optim.steps=6", "compile=true")
    assert done
    assert compiled
    assert not any("warning" in text for text in view.said)
    assert config("compile=true").compile
    # The next run tells how long this one compiled.
    assert view.summaries[0].rows["compiling"].startswith("in the first step, often for a minute")
    again, processes = config("optim.steps=6", "compile=true"), Distributed.start("cpu")
    summary = Loop(tmp_path / "again", again, Training(again, processes), processes, view).summary()
    assert re.fullmatch(r"in the first step; it took \d+ s last time", summary.rows["compiling"])
    assert summary.first_step == "compiling"
    plain, found = final(tmp_path / "plain"), final(tmp_path / "compiled")
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_a_user_network_is_compiled_as_a_whole():
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    want = network(x)
    compile_parts(network)
    torch.testing.assert_close(network(x), want)
    assert compiled == ["Module._call_impl"]
