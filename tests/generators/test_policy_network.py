"""PolicyNetwork: observations of all kinds, encoded once, saved and loaded."""

import json

import pytest
import torch

import driftgen as dg
from driftgen.generators import PolicyNetwork
from driftgen.generators.observation_encoder import SpatialSoftmax

SHAPES = {
    "observation.state": (4,),
    "observation.image": (12, 16, 3),
    "observation.images.wrist": (12, 16, 3),
}
OPTIONS = {"widths": [16], "groups": 4, "kernel_size": 3}
STATISTICS = {
    k: {"low": [0.1] * n, "high": [512.3] * n} for k, n in (("action", 2), ("observation.state", 4))
}


def build(shapes=SHAPES, **options):
    torch.manual_seed(0)
    settings = {"horizon": 8, "executed": 4, "options": OPTIONS, "image_widths": (16, 32), "keypoints": 4}
    return PolicyNetwork(shapes, 2, STATISTICS, **{**settings, **options})


def observe(n, shapes=SHAPES):
    values = {}
    for key, shape in shapes.items():
        image = len(shape) == 3
        values[key] = (
            torch.randint(256, (n, 2, *shape), dtype=torch.uint8) if image else torch.randn(n, 2, *shape)
        )
    return values


def test_every_kind_of_observation_matters():
    net = build()
    observations, noise = observe(2), net.sample_noise(2)
    before = net(noise, observations)
    assert before.shape == (2, 8, 2)
    for key in SHAPES:
        changed = {**observations, key: observe(2)[key]}
        assert (net(noise, changed) - before).abs().max() > 1e-4


def test_many_chunks_of_one_observation_equal_repeated_observations():
    net, calls = build(), []
    net.encoder.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    observations, noise = observe(3), net.sample_noise(12)
    repeated = {key: value.repeat_interleave(4, 0) for key, value in observations.items()}
    torch.testing.assert_close(net(noise, observations), net(noise, repeated))
    assert calls == [3, 12]
    with pytest.raises(dg.InputError, match="noise has 10 chunks, observations have 3 rows"):
        net(noise[:10], observations)


def test_saved_in_half_precision_keeps_its_statistics(tmp_path):
    net = build(crop=(10, 12), method="diffusion")
    dg.save_model(net, tmp_path / "m", dtype=torch.bfloat16)
    loaded = dg.load_model(tmp_path / "m")
    assert loaded.options() == net.options()
    assert loaded.statistics["action"]["high"] == [512.3] * 2
    assert loaded.generator.config.time_size == 128
    assert json.loads((tmp_path / "m" / "config.json").read_text())["architecture"] == "PolicyNetwork"
    assert "DriftingPolicy.from_pretrained" in (tmp_path / "m" / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executed": 8}, r"executed=8: a chunk of 8 actions begins at the first of 2 .* so 1 to 7"),
        ({"crop": (13, 12)}, r"crop=\[13, 12\] is larger than observation.image of 12x16 pixels"),
        ({"generator": "unet"}, "generator='unet' is not known: did you mean 'unet1d'"),
        ({"method": "flow"}, "method='flow' is not known"),
        ({"shapes": {"observation.state": (2, 2)}}, r"observation.state has shape \[2, 2\]"),
        ({"shapes": {}}, "observations is empty"),
    ],
)
def test_bad_options_are_one_line(options, message):
    with pytest.raises(dg.InputError, match=message):
        build(**options)


def test_spatial_softmax_finds_a_peak():
    layer = SpatialSoftmax(1, 1)
    torch.nn.init.constant_(layer.maps.weight, 1.0)
    torch.nn.init.zeros_(layer.maps.bias)
    x = torch.zeros(1, 1, 5, 9)
    x[0, 0, 1, 6] = 100.0
    torch.testing.assert_close(layer(x), torch.tensor([[0.5, -0.5]]))
