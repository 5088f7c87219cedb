"""Every configuration that the release's code builds, and options under their older names."""

import json

import numpy as np
import pytest
import torch

from driftgen.generators import DiT, DiTConfig
from driftgen.interop.dit_names import official_dit_names, official_dit_options
from driftgen.interop.flax_msgpack import read_parameters
from driftgen.interop.official import load_official, save_official
from driftgen.model_io import load_model, save_model
from tests.support.golden_dit import CASES, artifact, golden, noise_of
from tests.support.helpers import fails
from tests.support.release_dit import release_samples

TINY = {
    "input_size": 8,
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 10,
    "context_tokens": 3,
    "style_codebooks": 2,
    "style_entries": 8,
}
OPTIONS = {
    "no options": {},
    "layer norm": {"norm": "layer", "qk_norm": "layer"},
    "layer norm without qk norm": {"norm": "layer", "qk_norm": "none"},
    "no qk norm": {"qk_norm": "none"},
    "gelu": {"mlp": "gelu"},
    "gelu of another width": {"mlp": "gelu", "mlp_ratio": 2.5},
    "no rope": {"rope": False},
    "no style": {"style_codebooks": 0},
    "no context": {"context_tokens": 0},
    "wide condition": {"condition_size": 48},
    "narrow condition without context": {"condition_size": 16, "context_tokens": 0, "style_codebooks": 0},
    "all": {
        "norm": "layer",
        "qk_norm": "layer",
        "mlp": "gelu",
        "rope": False,
        "context_tokens": 0,
        "style_codebooks": 0,
        "condition_size": 20,
    },
}


def random_dit(**options):
    torch.manual_seed(0)
    net = DiT(**TINY | options)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return net


def release(folder, noise, labels, alpha):
    """Samples of the twin, from the files of an artifact."""
    options = json.loads((folder / "metadata.json").read_text())["model_config"]
    parameters = {k: v.numpy() for k, v in read_parameters(folder / "ema_params.msgpack").items()}
    x = noise.gaussian.permute(0, 2, 3, 1).numpy().astype(np.float64)
    samples = release_samples(parameters, options, x, labels.numpy(), alpha.numpy(), noise.style.numpy())
    return torch.tensor(samples).permute(0, 3, 1, 2)


@pytest.mark.parametrize("case", CASES)
def test_the_twin_agrees_with_the_authors_code(case):
    folder = artifact(case) / "params_ema"
    samples = release(folder, noise_of(case), golden(case, "c"), golden(case, "cfg"))
    torch.testing.assert_close(samples.float(), golden(case, "samples"), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_artifacts_with_every_option(name, tmp_path):
    """Written, read again bit by bit, and equal to the twin."""
    net = random_dit(**OPTIONS[name])
    save_official(net, tmp_path)
    loaded = load_official(tmp_path)
    assert isinstance(loaded, DiT)
    assert official_dit_options(loaded.config) == official_dit_options(net.config)
    assert loaded.state_dict().keys() == net.state_dict().keys()
    assert set(official_dit_names(net.config).values()) == set(net.state_dict())
    for key, value in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    noise = net.sample_noise(3, torch.Generator().manual_seed(1))
    labels, alpha = torch.tensor([1, 2, 7]), torch.tensor([1.0, 2.0, 3.5])
    want = release(tmp_path, noise, labels, alpha)
    with torch.no_grad():
        samples = loaded(noise, labels, alpha)
    assert (samples - want).norm() < 1e-5 * want.norm()
    for parameter in loaded.parameters():
        parameter.grad = None
    loaded(noise, labels, alpha).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in loaded.parameters())


def test_shapes_that_depend_on_the_width_of_the_condition(tmp_path):
    save_official(random_dit(condition_size=48), tmp_path)
    parameters = read_parameters(tmp_path / "ema_params.msgpack")
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    assert shapes["Embed_0/embedding"] == (10, 48)
    assert shapes["noise_embeds_1/embedding"] == (8, 48)
    assert shapes["RMSNorm_0/weight"] == (48,)
    assert shapes["LightningDiT_0/TorchLinear_1/Dense_0/kernel"] == (48, 32)
    assert shapes["LightningDiT_0/blocks_0/TorchLinear_0/Dense_0/kernel"] == (48, 6 * 32)
    assert shapes["LightningDiT_0/FinalLayer_0/TorchLinear_0/Dense_0/kernel"] == (48, 2 * 32)


def test_configurations_without_a_released_form(tmp_path):
    fails(
        lambda: save_official(random_dit(mlp="gelu_tanh"), tmp_path), "mlp='gelu_tanh' has no released form"
    )
    fails(
        lambda: save_official(random_dit(norm="layer"), tmp_path),
        "qk_norm='rms' with norm='layer' has no released form: qk_norm must be 'layer' or 'none'",
    )


@pytest.mark.parametrize(
    ("older", "current"),
    [
        ({"rms_norm": True, "swiglu": True, "qk_norm": True}, {}),
        ({"swiglu": False}, {"mlp": "gelu_tanh"}),
        ({"rms_norm": False}, {"norm": "layer"}),
        ({"qk_norm": False}, {"qk_norm": "none"}),
    ],
)
def test_options_under_their_older_names(older, current, tmp_path):
    """In Python, and in the ``config.json`` of a saved model."""
    net = random_dit(**older)
    assert net.config == DiTConfig(**TINY | current)
    save_model(net, tmp_path)
    path = tmp_path / "config.json"
    record = json.loads(path.read_text())
    for name in ("norm", "mlp", "qk_norm", "condition_size"):
        del record["options"][name]
    record["options"] |= {"rms_norm": True, "swiglu": True, "qk_norm": True} | older
    path.write_text(json.dumps(record))
    loaded = load_model(tmp_path)
    assert loaded.config == net.config
    noise, labels = net.sample_noise(2), torch.tensor([0, 1])
    with torch.no_grad():
        assert torch.equal(loaded(noise, labels), net(noise, labels))
