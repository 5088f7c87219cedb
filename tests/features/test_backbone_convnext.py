"""The released ConvNeXt-V2 against golden values: features, gradients, artifact, switches, dtypes."""

import json

import numpy as np
import pytest
import torch

from driftgen.features.backbones import Backbone
from driftgen.interop.convnext_names import convnext_config_from, official_convnext_names
from driftgen.interop.flax_msgpack import read_parameters
from tests.support.backbone_networks import ARTIFACT, DATA, STD, golden_model

GOLDEN = np.load(DATA / "04_convnext.npz")
NOTE = json.loads((DATA / "04_convnext.json").read_text())
# The note also lists "in64_upsample", whose arrays are not in the file; "activation_fn" is upsampled from 32.
CASES = ["in256_downsample", "in224_identity", "activation_fn"]


def to_theirs(name, tensor):
    if not name.endswith("/kernel"):
        return tensor
    return (tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T).contiguous()


def golden_input(case):
    """The images in -1 ... 1."""
    if case == "activation_fn":
        x = torch.from_numpy(GOLDEN["activation_fn/x"])
    else:
        x = torch.from_numpy(GOLDEN[f"{case}/x_u8"]).float() / 127.5 - 1
    return x.permute(0, 3, 1, 2).contiguous()


def deviation(key, got):
    """Return the largest deviation from a stored array or its summary, and the largest stored value."""
    got = got.detach().double().numpy()
    if key in GOLDEN:
        assert got.shape == GOLDEN[key].shape
        return np.abs(got - GOLDEN[key]).max(), np.abs(GOLDEN[key]).max()
    flat = got.reshape(-1)
    samples = {"first64": flat[:64], "strided256": flat[np.linspace(0, flat.size - 1, 256).astype(np.int64)]}
    stats = np.array([flat.mean(), flat.std(), flat.sum(), (flat**2).sum(), flat.min(), flat.max()])
    want, size = GOLDEN[f"{key}:stats"], np.array([1, 1, flat.size, flat.size, 1, 1])
    off = [np.abs(stats / size - want / size).max()]
    off += [np.abs(part - GOLDEN[f"{key}:{name}"]).max() for name, part in samples.items()]
    return max(off), np.abs(want[4:]).max()


@pytest.mark.parametrize("case", CASES)
def test_convnext_golden(case):
    """Features agree to 5e-6 (maps reach 4), gradients to 5e-6 of the largest entry."""
    model, x = golden_model(), golden_input(case).requires_grad_()
    features = model.features(x)
    stored = (NOTE["activation_fn"] if case == "activation_fn" else NOTE["inputs"][case])["activations"]
    ours = {name: entry["shape"] for name, entry in stored.items() if name in features}
    assert list(features) == [
        *(f"convenxt_stage_{i}{part}" for i in range(4) for part in ("", "_mean", "_std") if i or part),
        "global_mean",
        "global_std",
    ]
    assert {name: list(f.shape) for name, f in features.items()} == ours
    assert sum(f.shape[1] for f in features.values()) == 1039
    for name, feature in features.items():
        off, _ = deviation(f"{case}/act/{name}", feature.contiguous())
        assert off <= 5e-6, f"{name}: {off:.1e}"
    # Only this check is sensitive to the LayerNorm's eps: 1e-12 would deviate by 1.4e-6.
    assert deviation(f"{case}/act/global_mean", features["global_mean"])[0] <= 1e-6
    if case == "activation_fn":
        return
    resized = model.preprocess(x).permute(0, 2, 3, 1).contiguous()
    assert deviation(f"{case}/resized224", resized)[0] <= 1e-6
    pooled = features["global_mean"][:, 0]
    assert deviation(f"{case}/pooled_forward_features", pooled)[0] <= 1e-6
    sum(f.square().mean() for f in features.values()).backward()
    # The golden gradient is with respect to ((x + 1) / 2 - mean) / std.
    gradient = (x.grad * 2 * STD[:, None, None]).permute(0, 2, 3, 1).contiguous()
    off, largest = deviation(f"{case}/grad_x", gradient)
    assert off <= 5e-6 * largest, f"{off:.1e} where values reach {largest:.1e}"


def test_convnext_artifact_round_trip():
    parameters = read_parameters(ARTIFACT)
    config = convnext_config_from(parameters)
    assert config == {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32], "num_classes": None}
    assert config == {**NOTE["config"], "num_classes": None}  # the artifact holds no classifier
    names = official_convnext_names(config)
    assert set(names) == set(parameters) == set(NOTE["param_shapes"])
    model = golden_model()
    assert model.options() == config
    state = model.state_dict()
    assert sorted(names.values()) == sorted(state)
    for name, tensor in parameters.items():
        assert torch.equal(to_theirs(name, state[names[name]]), tensor), name
    # assign=True leaves no parameter on the meta device, and none that requires a gradient.
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("classes", [None, 10])
def test_convnext_with_and_without_its_head(classes):
    config = {"depths": [2, 1, 3], "dims": [8, 12, 16], "num_classes": classes}
    with torch.device("meta"):
        model = Backbone.from_convnext(**config)
    names = official_convnext_names(config)
    state = model.state_dict()
    assert sorted(names.values()) == sorted(state)
    assert ("head.weight" in state) == (classes is not None)
    tree = {name: to_theirs(name, state[ours]) for name, ours in names.items()}
    assert convnext_config_from(tree) == model.options() == config
    assert tree["stages_2/layers_2/dwconv/kernel"].shape == (7, 7, 1, 16)
    assert tree["stages_1/layers_0/grn/gamma"].shape == (1, 1, 1, 48)


def test_convnext_full_size():
    """The shape of the released encoder has 1039 vectors per image."""
    with torch.device("meta"):
        model = Backbone.from_convnext((3, 3, 27, 3), (128, 256, 512, 1024))
        features = model.features(torch.empty(2, 3, 256, 256))
    assert sum(f.shape[1] for f in features.values()) == 1039
    assert features["convenxt_stage_1"].shape == (2, 784, 256)
    assert sum(p.numel() for p in model.parameters()) == 87_692_800


def test_convnext_switches():
    model, x = golden_model(), torch.rand(1, 3, 64, 64) * 2 - 1
    model.size = None
    maps = model.encode(x)
    assert [m.shape[1:] for m in maps.values()] == [(8, 16, 16), (16, 8, 8), (24, 4, 4), (32, 2, 2)]
    for feature_map in maps.values():
        assert feature_map.mean(1).abs().max() < 1e-5
        assert (feature_map.std(1, correction=0) - 1).abs().max() < 0.05
    features = model.features(x)
    assert "convenxt_stage_0" not in features
    assert torch.equal(features["convenxt_stage_2"], maps["convenxt_stage_2"].flatten(2).mT)
    assert list(model.features(x, mean_std=False)) == [f"convenxt_stage_{i}" for i in (1, 2, 3)]
    assert "convenxt_stage_3" not in model.features(x, vectors=False)
    assert model.features(x, patch_sizes=(2,))["convenxt_stage_0_std_2"].shape == (1, 64, 8)


def test_equal_channels_have_a_gradient():
    """Equal channels have a standard deviation of 0; the gradient must not be NaN."""
    model = golden_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    sum(f.sum() for f in model.features(x).values()).backward()
    assert x.grad.isfinite().all()


def test_bfloat16():
    x = golden_input("activation_fn")
    exact, got = golden_model().features(x), golden_model(torch.bfloat16).features(x)
    for name, feature in got.items():
        assert feature.dtype == (torch.float32 if "_std" in name else torch.bfloat16)
        assert (feature - exact[name]).abs().mean() < 0.05, name
    with torch.autocast("cpu", torch.bfloat16):
        mixed = golden_model().features(x)
    assert all(f.isfinite().all() for f in mixed.values())


@pytest.mark.slow
def test_compiled():
    model, x = golden_model(), golden_input("activation_fn")
    model.size = (32, 32)
    compiled = torch.compile(model.features, backend="aot_eager", fullgraph=True)
    for name, feature in compiled(x).items():
        assert torch.allclose(feature, model.features(x)[name], atol=1e-5), name
