import importlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from driftgen.errors import InputError
from driftgen.features.backbones import Backbone
from driftgen.features.resnet_layouts import read_resnet50
from driftgen.interop.convnext_names import (
    convnext_config_from,
    official_convnext_names,
)
from driftgen.interop.flax_msgpack import read_parameters

transformers = pytest.importorskip("transformers")

DATA = Path(__file__).parent / "data"
GOLDEN = np.load(DATA / "04_convnext.npz")
NOTE = json.loads((DATA / "04_convnext.json").read_text())
ARTIFACT = DATA / "artifacts" / "convnext_tiny" / "params.msgpack"
# The note also lists "in64_upsample", whose arrays are not in the file; "activation_fn" is upsampled from 32.
CASES = ["in256_downsample", "in224_identity", "activation_fn"]
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def to_ours(name, tensor):
    if not name.endswith("/kernel"):
        return tensor
    return (tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.T).contiguous()


def to_theirs(name, tensor):
    if not name.endswith("/kernel"):
        return tensor
    return (tensor.permute(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T).contiguous()


def golden_model(dtype=torch.float32):
    parameters = read_parameters(ARTIFACT)
    config = convnext_config_from(parameters)
    names = official_convnext_names(config)
    with torch.device("meta"):
        model = Backbone.from_convnext(**config)
    state = {names[name]: to_ours(name, tensor) for name, tensor in parameters.items()}
    model.load_state_dict(state, assign=True)
    return model.to(dtype)


def golden_input(case):
    """The images in -1 ... 1."""
    if case == "activation_fn":
        x = torch.from_numpy(GOLDEN["activation_fn/x"])
    else:
        x = torch.from_numpy(GOLDEN[f"{case}/x_u8"]).float() / 127.5 - 1
    return x.permute(0, 3, 1, 2).contiguous()


def deviation(key, got):
    """Largest deviation from a stored array or its stored summary, and the largest value in it."""
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


# --- the released ConvNeXt-V2 ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_convnext_golden(case):
    """1e-5 on every feature (maps reach 4); 5e-6 of the largest entry on the gradient."""
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
    # The LayerNorm's eps shows only here: 1e-12 would be 1.4e-6 off.
    assert deviation(f"{case}/act/global_mean", features["global_mean"])[0] <= 1e-6
    if case == "activation_fn":
        return
    resized = model.preprocess(x).permute(0, 2, 3, 1).contiguous()
    assert deviation(f"{case}/resized224", resized)[0] <= 1e-6
    pooled = features["global_mean"][:, 0]
    assert deviation(f"{case}/pooled_forward_features", pooled)[0] <= 1e-6
    sum(f.square().mean() for f in features.values()).backward()
    # The golden's gradient is to ((x + 1) / 2 - mean) / std.
    gradient = (x.grad * 2 * STD[:, None, None]).permute(0, 2, 3, 1).contiguous()
    off, largest = deviation(f"{case}/grad_x", gradient)
    assert off <= 5e-6 * largest, f"{off:.1e} where values reach {largest:.1e}"


def test_convnext_artifact_round_trip():
    parameters = read_parameters(ARTIFACT)
    config = convnext_config_from(parameters)
    assert config == {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32], "num_classes": None}
    assert config == {**NOTE["config"], "depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32], "num_classes": None}
    names = official_convnext_names(config)
    assert set(names) == set(parameters) == set(NOTE["param_shapes"])
    model = golden_model()
    assert model.options() == config
    state = model.state_dict()
    assert sorted(names.values()) == sorted(state)
    for name, tensor in parameters.items():
        assert torch.equal(to_theirs(name, state[names[name]]), tensor), name
    # assign=True into a model on "meta" leaves nothing behind there, and nothing trainable.
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
    """The released encoder's shape; 1039 vectors an image."""
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
    """The standard deviation over equal channels is 0: the gradient must not be NaN."""
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


def test_compiled():
    model, x = golden_model(), golden_input("activation_fn")
    model.size = (32, 32)
    compiled = torch.compile(model.features, backend="aot_eager", fullgraph=True)
    for name, feature in compiled(x).items():
        assert torch.allclose(feature, model.features(x)[name], atol=1e-5), name


# --- published folders ----------------------------------------------------------------------------------


def scramble(model):
    """Random numbers in every tensor, statistics of batch norms included."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                kept = tensor if tensor.ndim > 1 else 0.3 * noise + (1 if "weight" in name else 0)
                tensor.copy_(noise.abs() + 0.5 if "running_var" in name else kept)
    return model.eval()


def tiny_convnext():
    config = transformers.ConvNextV2Config(
        depths=[1, 2, 1, 1], hidden_sizes=[8, 12, 16, 24], num_labels=5, drop_path_rate=0.5
    )
    return scramble(transformers.ConvNextV2ForImageClassification(config))


def tiny_resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32, 48, 64], depths=[1, 2, 4, 1], num_labels=5
    )
    return scramble(transformers.ResNetForImageClassification(config))


def tiny_dinov2():
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=8, num_attention_heads=2, image_size=56, patch_size=14, mlp_ratio=2
    )
    return scramble(transformers.Dinov2Model(config))


def normalised(x):
    return ((x + 1) / 2 - MEAN[:, None, None]) / STD[:, None, None]


def test_convnext_folder(tmp_path):
    whole = tiny_convnext()
    whole.save_pretrained(tmp_path)
    assert "convnextv2.layernorm.weight" in load_file(tmp_path / "model.safetensors")
    model, x = Backbone(tmp_path), torch.rand(2, 3, 224, 224) * 2 - 1
    features = model.features(x)
    assert len(features) == 13
    assert torch.equal(model.model.layernorm.weight, whole.convnextv2.layernorm.weight)
    assert (model.model.layernorm.weight - 1).abs().max() > 0.1
    with torch.no_grad():
        want = whole.convnextv2(normalised(x), output_hidden_states=True)
    assert torch.allclose(features["global_mean"][:, 0], want.pooler_output, atol=1e-4)
    y = want.hidden_states[2]
    y = (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True, correction=0) + 1e-3)
    assert torch.allclose(features["convenxt_stage_1"], y.flatten(2).mT, atol=1e-4)


def test_resnet_folder(tmp_path):
    whole = tiny_resnet()
    whole.save_pretrained(tmp_path)
    model, x = Backbone(str(tmp_path), size=64), torch.rand(2, 3, 64, 64) * 2 - 1
    maps = model.encode(x)
    assert list(maps) == ["layer1", "layer2", "layer3", "layer4", "layer2_blk2", "layer3_blk2", "layer3_blk4"]
    with torch.no_grad():
        want = whole.resnet(normalised(x), output_hidden_states=True).hidden_states
    for i in range(1, 5):
        assert torch.allclose(maps[f"layer{i}"], want[i], atol=1e-5)
    assert torch.equal(maps["layer2_blk2"], maps["layer2"])
    assert not torch.equal(maps["layer3_blk2"], maps["layer3"])
    assert len(model.encode(x, every_k_block=0)) == 4
    features = model.features(x)
    assert features["layer1_mean_4"].shape == (2, 16, 16)
    assert features["layer3_std_4"].shape == (2, 1, 48)


def test_dinov2_folder(tmp_path):
    whole = tiny_dinov2()
    whole.save_pretrained(tmp_path)
    x = torch.rand(2, 3, 66, 40) * 2 - 1
    model = Backbone(tmp_path, size=56)
    maps = model.encode(x)
    assert {name: m.shape for name, m in maps.items()} == {f"stage{i}": (2, 16, 4, 4) for i in (2, 4, 6, 8)}
    assert len(model.features(x)) == 4 * 7
    with torch.no_grad():
        small = F.interpolate(normalised(x), size=(56, 56), mode="bilinear", antialias=True)
        want = whole(small).last_hidden_state[:, 1:]
    assert torch.allclose(maps["stage8"].flatten(2).mT, want, atol=1e-5)
    # Kept sizes become the nearest multiple of the patch: 66 x 40 pixels are 5 x 3 patches of 14.
    chosen = Backbone(tmp_path, size=None, stages=["stage8", "stage1"]).encode(x)
    assert {name: m.shape for name, m in chosen.items()} == {
        "stage1": (2, 16, 5, 3),
        "stage8": (2, 16, 5, 3),
    }


def test_other_backbones(tmp_path):
    """Anything that AutoBackbone knows; Swin's backbone has norms that no trained network has."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    transformers.SwinModel(config).save_pretrained(tmp_path)
    maps = Backbone(tmp_path, size=32).encode(torch.rand(1, 3, 32, 32))
    assert {name: m.shape for name, m in maps.items()} == {"stage1": (1, 8, 8, 8), "stage2": (1, 16, 4, 4)}


def test_a_model_of_transformers():
    config = transformers.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2)
    model = Backbone(transformers.ConvNextBackbone(config), size=32)
    assert list(model.encode(torch.rand(1, 1, 32, 32))) == ["stage2"]


def test_normalisation_of_the_folder(tmp_path):
    tiny_resnet().save_pretrained(tmp_path)
    record, path = {}, tmp_path / "preprocessor_config.json"
    x = torch.rand(1, 3, 16, 16) * 2 - 1

    def seen(**options):
        path.write_text(json.dumps(record | options))
        return Backbone(tmp_path, size=None).preprocess(x)

    assert torch.allclose(seen(), normalised(x), atol=1e-6)
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert torch.allclose(seen(**halves), x, atol=1e-6)
    assert torch.allclose(seen(**halves, do_normalize=False), (x + 1) / 2, atol=1e-6)
    assert torch.allclose(seen(do_rescale=False, do_normalize=False), (x + 1) * 127.5, atol=1e-4)
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Backbone(tmp_path)
    given = Backbone(tiny_resnet().resnet, size=None, mean=(0, 0, 0), std=(1, 1, 1)).preprocess(x)
    assert torch.equal(given, (x + 1) / 2)


# --- frozen ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_convnext, tiny_resnet, tiny_dinov2])
def test_frozen(make, tmp_path):
    make().save_pretrained(tmp_path)
    model = Backbone(tmp_path, size=56)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    assert not any(module.training for module in model.modules())
    assert not any(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    x = torch.randn(2, 3, 48, 48, requires_grad=True)
    features = model(x)
    assert all(f.ndim == 3 and len(f) == 2 and f.isfinite().all() for f in features.values())
    sum(f.square().mean() for f in features.values()).backward()
    assert x.grad.isfinite().all()
    assert (x.grad.abs().amax((1, 2, 3)) > 0).all()
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    alone = model(x[1:])
    assert all(torch.allclose(f[1:], alone[name], atol=1e-4) for name, f in features.items())


def test_input_is_not_clipped_and_grey_is_repeated():
    model = golden_model()
    model.size = None
    x = torch.randn(1, 1, 32, 32) * 3
    assert torch.allclose(model.preprocess(x), normalised(x.repeat(1, 3, 1, 1)), atol=1e-5)
    together, grey = model.features(x.repeat(1, 3, 1, 1)), model.features(x)
    assert all(torch.equal(together[name], feature) for name, feature in grey.items())


def test_resize_in_float64_has_a_right_gradient():
    model = golden_model(torch.float64)
    for size in ((5, 4), (9, 12)):
        model.size = size
        model._target = lambda height, width, size=size: size
        x = torch.randn(1, 3, 7, 6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(model.preprocess, x)


# --- ResNet-50 in its published layouts -----------------------------------------------------------------

DEPTHS, WIDTH = (3, 4, 6, 3), 4


def torchvision_state(width=WIDTH):
    """Random weights under torchvision's names."""
    generator = torch.Generator().manual_seed(7)
    state = {}

    def convolution(name, inputs, outputs, kernel):
        scale = (2 / (inputs * kernel**2)) ** 0.5
        state[f"{name}.weight"] = torch.randn(outputs, inputs, kernel, kernel, generator=generator) * scale

    def norm(name, channels):
        # Small at the end of a block, or sixteen of them add up to thousands.
        size = 0.1 if name.endswith(("bn3", "downsample.1")) else 1.0
        state[f"{name}.weight"] = size * (0.5 + torch.rand(channels, generator=generator))
        state[f"{name}.bias"] = 0.2 * torch.randn(channels, generator=generator)
        state[f"{name}.running_mean"] = 0.2 * torch.randn(channels, generator=generator)
        state[f"{name}.running_var"] = 0.5 + torch.rand(channels, generator=generator)
        state[f"{name}.num_batches_tracked"] = torch.tensor(11)

    convolution("conv1", 3, width, 7)
    norm("bn1", width)
    inputs = width
    for i, count in enumerate(DEPTHS):
        middle = width * 2**i
        for k in range(count):
            block = f"layer{i + 1}.{k}"
            for part, (a, b, kernel) in enumerate(
                [(inputs, middle, 1), (middle, middle, 3), (middle, 4 * middle, 1)]
            ):
                convolution(f"{block}.conv{part + 1}", a, b, kernel)
                norm(f"{block}.bn{part + 1}", b)
            if k == 0:
                convolution(f"{block}.downsample.0", inputs, 4 * middle, 1)
                norm(f"{block}.downsample.1", 4 * middle)
            inputs = 4 * middle
    return state


def torchvision_maps(state, x):
    """torchvision's ResNet-50 (stride on the 3x3 convolution), written out."""

    def unit(x, convolution, norm, stride=1):
        weight = state[f"{convolution}.weight"]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        parts = (state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts, eps=1e-5)

    x = F.max_pool2d(unit(x, "conv1", "bn1", 2).relu(), 3, 2, padding=1)
    maps = {}
    for i, count in enumerate(DEPTHS, start=1):
        for k in range(count):
            block, stride = f"layer{i}.{k}", 2 if i > 1 and k == 0 else 1
            y = unit(x, f"{block}.conv1", f"{block}.bn1").relu()
            y = unit(y, f"{block}.conv2", f"{block}.bn2", stride).relu()
            y = unit(y, f"{block}.conv3", f"{block}.bn3")
            if k == 0:
                x = unit(x, f"{block}.downsample.0", f"{block}.downsample.1", stride)
            x = (x + y).relu()
            if k % 2 == 1:
                maps[f"layer{i}_blk{k + 1}"] = x
        maps[f"layer{i}"] = x
    return maps


def simclr_v2_name(name):
    """The name in Separius/SimCLRv2-Pytorch of a tensor of torchvision."""
    if name.startswith("fc."):
        return name
    *place, leaf = name.split(".")
    if len(place) == 1:
        return f"net.0.{'0' if place[0] == 'conv1' else '1.0'}.{leaf}"
    start = f"net.{place[0].removeprefix('layer')}.blocks.{place[1]}"
    if place[2] == "downsample":
        return f"{start}.projection.{'shortcut' if place[3] == '0' else 'bn.0'}.{leaf}"
    part = int(place[2][-1]) - 1
    kind = f"{2 * part}" if place[2].startswith("conv") else f"{2 * part + 1}.0"
    return f"{start}.net.{kind}.{leaf}"


def published(layout, path):
    """Writes the same network in a published layout; gives the options to read it with."""
    state = torchvision_state()
    classifier = {"fc.weight": torch.randn(10, 8 * 4 * WIDTH), "fc.bias": torch.randn(10)}
    if layout == "torchvision":
        torch.save(state | classifier, path)
    elif layout == "torchvision without counters":
        torch.save({n: t for n, t in state.items() if not n.endswith("tracked")} | classifier, path)
    elif layout == "torchvision training":
        state = {f"module.{n}": t for n, t in (state | classifier).items()}
        torch.save(
            {"epoch": 90, "arch": "resnet50", "state_dict": state, "best_acc1": torch.tensor(76.0)}, path
        )
    elif layout == "moco":
        head = {
            f"module.encoder_q.fc.{i}.{leaf}": torch.randn(3) for i in (0, 2) for leaf in ("weight", "bias")
        }
        momentum = {f"module.encoder_k.{n}": torch.zeros_like(t) for n, t in state.items()}
        queue = {"module.queue": torch.randn(4, 8), "module.queue_ptr": torch.zeros(1, dtype=torch.int64)}
        state = {f"module.encoder_q.{n}": t for n, t in state.items()} | head | momentum | queue
        torch.save({"epoch": 800, "arch": "resnet50", "state_dict": state, "optimizer": {"state": {}}}, path)
    elif layout == "simclr":
        torch.save({"state_dict": state | classifier}, path)
        return {"layout": "simclr"}
    else:
        resnet = {simclr_v2_name(n): t for n, t in (state | classifier).items()}
        torch.save({"resnet": resnet, "head": {"layers.0.weight": torch.randn(3, 3)}}, path)
    return {}


@pytest.mark.parametrize(
    "layout",
    ["torchvision", "torchvision without counters", "torchvision training", "moco", "simclr", "simclr-v2"],
)
def test_resnet50_layouts(layout, tmp_path):
    path = tmp_path / "weights.pth"
    model = Backbone.resnet50(path, **published(layout, path), size=64)
    x = torch.rand(2, 3, 64, 64) * 2 - 1
    maps = model.encode(x)
    want = torchvision_maps(torchvision_state(), (x + 1) / 2 if "simclr" in layout else normalised(x))
    assert set(maps) == set(want)
    assert list(maps)[:5] == ["layer1", "layer2", "layer3", "layer4", "layer1_blk2"]
    for name, feature_map in maps.items():
        assert 0.5 < want[name].abs().max() < 10
        assert (feature_map - want[name]).abs().max() <= 1e-5, name
    assert maps["layer4"].shape == (2, 32 * WIDTH, 2, 2)
    # The recognised layout and the named one are the same.
    named = Backbone.resnet50(path, layout=layout.split()[0], size=64).encode(x)
    assert all(torch.equal(named[name], feature_map) for name, feature_map in maps.items())


def test_resnet50_safetensors_and_options(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(torchvision_state(), path)
    x = torch.rand(1, 3, 64, 64) * 2 - 1
    model = Backbone.resnet50(path, size=None, mean=(0, 0, 0), std=(1, 1, 1), dtype=torch.float64)
    maps = model.encode(x)
    want = torchvision_maps(torchvision_state(), (x + 1) / 2)
    assert maps["layer4"].dtype == torch.float64
    assert torch.allclose(maps["layer4"].float(), want["layer4"], atol=1e-4)
    # MoCo's names survive the conversion to safetensors.
    save_file({f"module.encoder_q.{n}": t for n, t in torchvision_state().items()}, path)
    assert read_resnet50(path)[1] == "moco"


def test_resnet50_is_one(tmp_path):
    """At the published width: as many parameters as torchvision's without its classifier."""
    torch.save(torchvision_state(64), tmp_path / "resnet50.pth")
    model = Backbone.resnet50(tmp_path / "resnet50.pth")
    assert sum(p.numel() for p in model.parameters()) == 23_508_032
    features = model.to("meta").features(torch.empty(1, 1, 32, 32, device="meta"))
    assert features["layer4"].shape == (1, 49, 2048)
    assert features["layer1_blk2"].shape == (1, 56 * 56, 256)
    # 11 maps; 14x14 (layer3, its blocks 2, 4, 6) has no patches of 4, 7x7 (layer4, its block 2) none at all.
    assert len(features) == 5 * 7 + 4 * 5 + 2 * 3


# --- wrong input ----------------------------------------------------------------------------------------


def one_line(call, message):
    with pytest.raises(InputError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_wrong_folders(tmp_path, monkeypatch):
    one_line(lambda: Backbone(tmp_path / "none"), "none does not exist")
    one_line(lambda: Backbone(str(tmp_path / "none")), "none does not exist")
    one_line(lambda: Backbone(tmp_path), "holds no config.json")
    (tmp_path / "config.json").write_text("{")
    one_line(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    one_line(lambda: Backbone(tmp_path / "config.json"), "is a file")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_network"}')
    one_line(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    one_line(lambda: Backbone(tmp_path), "a vit is no backbone of transformers")
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    one_line(
        lambda: Backbone("driftgen-test/no-such-model"),
        "^driftgen-test/no-such-model is not in the local cache and the Hugging Face Hub cannot be reached",
    )


@pytest.mark.parametrize("make", [tiny_convnext, tiny_resnet, tiny_dinov2])
def test_damaged_folders(make, tmp_path):
    make().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    one_line(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    weights.write_bytes(whole)
    tensors = load_file(weights)
    lost = [name for name in tensors if name.endswith("bias")][:9]
    save_file({n: t for n, t in tensors.items() if n not in lost}, weights, metadata={"format": "pt"})
    one_line(lambda: Backbone(tmp_path), "lacks weights of a .*; missing: .* and [34] more")
    weights.unlink()
    one_line(lambda: Backbone(tmp_path), "cannot be read as a backbone")


class Evil:
    def __reduce__(self):
        return (print, ("executed",))


def test_folder_of_pickled_weights(tmp_path, capsys):
    """Older folders hold pytorch_model.bin: its tensors are read, and nothing in it is executed."""
    tiny_convnext().save_pretrained(tmp_path)
    x = torch.rand(1, 3, 32, 32)
    want = Backbone(tmp_path, size=32)(x)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert all(torch.equal(want[name], f) for name, f in Backbone(tmp_path, size=32)(x).items())
    capsys.readouterr()
    torch.save(tensors | {"more": Evil()}, tmp_path / "pytorch_model.bin")
    one_line(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    assert "executed" not in capsys.readouterr().out


def test_wrong_weight_files(tmp_path, capsys):
    path, state = tmp_path / "weights.pth", torchvision_state()

    def wrong(content, message, **options):
        torch.save(content, path)
        one_line(lambda: Backbone.resnet50(path, **options), message)

    one_line(lambda: Backbone.resnet50(tmp_path / "none.pth"), "none.pth does not exist")
    one_line(
        lambda: Backbone.resnet50(path, layout="mocco"), "layout='mocco' is not known: did you mean 'moco'"
    )
    wrong({"state_dict": state}, "say layout='simclr' or layout='torchvision'")
    wrong(state | {"layer5.weight": torch.ones(1)}, "layout 'torchvision'; unknown: layer5.weight$")
    lost = {n: t for n, t in state.items() if n not in ("bn1.bias", "layer4.2.conv3.weight")}
    wrong(lost, "layout 'torchvision'; missing: bn1.bias, layer4.2.conv3.weight$")
    wrong(state, "layout 'moco'; unknown: .* more; missing: module.encoder_q.conv1.weight", layout="moco")
    wrong({"encoder.0": torch.ones(1)}, "is no ResNet-50 of a known layout .*: it holds encoder.0 ...")
    wrong(
        state | {"layer1.0.conv2.weight": torch.ones(4, 4, 1, 1)},
        r"has shape \[4, 4, 1, 1\], expected \[4, 4, 3, 3\]",
    )
    wrong(state | {"bn1.bias": 3}, "bn1.bias is no tensor but int")
    wrong([1, 2], "holds no state_dict but a list")
    wrong({"state_dict": Evil()}, "it is not read, because that would execute code")
    assert capsys.readouterr().out == ""
    for name in ("weights.pth", "weights.safetensors"):
        path = tmp_path / name
        save_file(state, path) if name.endswith("safetensors") else torch.save(state, path)
        path.write_bytes(path.read_bytes()[:5000])
        one_line(lambda path=path: Backbone.resnet50(path), "damaged")


X = torch.zeros(1, 3, 32, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: golden_model().features(torch.zeros(1, 4, 32, 32)), r"^x has shape \[1, 4, 32, 32\]"),
        (lambda: golden_model().features(X[0]), "^x has shape"),
        (lambda: golden_model().features(X.byte()), "^x is torch.uint8"),
        (lambda: golden_model().features(X, every_k_block=-1), "^every_k_block=-1"),
        (lambda: golden_model().features(X, patch_sizes=(0,)), "^patch_sizes="),
        (lambda: Backbone.from_convnext((1,), (8,), size=3).features(X), "3x3 pixels are too few: .* 4$"),
        (lambda: Backbone.from_convnext((1, 1), (8,)), r"^depths=\(1, 1\) and dims=\(8,\)"),
        (lambda: Backbone.from_convnext((0,), (8,)), "^depths="),
        (lambda: Backbone.from_convnext((1,), (8,), 0), "^num_classes=0"),
        (lambda: Backbone.from_convnext((1,), (8,), size=0), "^size=0"),
        (lambda: Backbone(tiny_resnet().resnet, mean=(0, 0)), "^mean="),
        (lambda: Backbone(tiny_resnet().resnet, std=(1, 1, 0)), "^mean=.* std above 0"),
        (
            lambda: Backbone(tiny_resnet().resnet, stages=["stage1"]),
            r"^stages=\['stage1'\] is for a folder",
        ),
        (lambda: Backbone(tiny_resnet()), "^ResNetForImageClassification gives no feature maps"),
        (lambda: Backbone(torch.nn.Linear(1, 1)), "^Linear gives no feature maps"),
        (lambda: convnext_config_from({}), "downsample_layers_0/layers_0/kernel is missing"),
        (
            lambda: convnext_config_from({"downsample_layers_0/layers_0/kernel": torch.ones(4, 4, 3, 8)}),
            "stages_0/layers_0 is missing",
        ),
        (
            lambda: Backbone(tiny_resnet().resnet).options(),
            "^a backbone of kind resnet keeps its own folder",
        ),
    ],
)
def test_wrong_input(call, message):
    one_line(call, message)


def test_wrong_stages(tmp_path):
    tiny_dinov2().save_pretrained(tmp_path)
    tiny_resnet().save_pretrained(tmp_path / "resnet")
    one_line(
        lambda: Backbone(tmp_path / "resnet", stages=["stage1"]), r"stages=\['stage1'\] is not for a resnet"
    )
    one_line(lambda: Backbone(tmp_path, stages=["stage9"]), r"stages=\['stage9'\] must be some of stage1, ")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_channels": 1}))
    one_line(lambda: Backbone(tmp_path), "cannot be read|only 3 are supported")


def test_without_transformers(tmp_path, monkeypatch):
    tiny_resnet().save_pretrained(tmp_path)
    torch.save(torchvision_state(), tmp_path / "weights.pth")

    def absent(name, *args):
        if name == "transformers":
            raise ImportError(name)
        return imported(name, *args)

    imported = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", absent)
    for call in (
        lambda: Backbone(tmp_path),
        lambda: Backbone("owner/name"),
        lambda: Backbone.resnet50(tmp_path / "weights.pth"),
        lambda: Backbone.from_convnext((1,), (8,)),
    ):
        one_line(call, r"^Backbone needs transformers: pip install 'driftgen\[encoders\]'$")
