"""ResNet-50 from files of weights in the layouts in which they are published."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from driftgen.features.backbones import Backbone
from driftgen.features.resnet50_checkpoints import read_resnet50
from tests.support.backbone_networks import DEPTHS, WIDTH, Evil, normalized, torchvision_state
from tests.support.helpers import fails


def torchvision_maps(state, x):
    """Reference implementation of torchvision's ResNet-50 (stride on the 3x3 convolution)."""

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
    """Return the name in Separius/SimCLRv2-Pytorch of a torchvision tensor."""
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
    """Write the same network in a published layout; return the options for reading it."""
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
    want = torchvision_maps(torchvision_state(), (x + 1) / 2 if "simclr" in layout else normalized(x))
    assert set(maps) == set(want)
    assert list(maps)[:5] == ["layer1", "layer2", "layer3", "layer4", "layer1_blk2"]
    for name, feature_map in maps.items():
        assert 0.5 < want[name].abs().max() < 10
        assert (feature_map - want[name]).abs().max() <= 1e-5, name
    assert maps["layer4"].shape == (2, 32 * WIDTH, 2, 2)
    # Detecting the layout and naming it give the same network.
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


def test_resnet50_has_the_published_size(tmp_path):
    """At the published width it has as many parameters as torchvision's without the classifier."""
    torch.save(torchvision_state(64), tmp_path / "resnet50.pth")
    model = Backbone.resnet50(tmp_path / "resnet50.pth")
    assert sum(p.numel() for p in model.parameters()) == 23_508_032
    features = model.to("meta").features(torch.empty(1, 1, 32, 32, device="meta"))
    assert features["layer4"].shape == (1, 49, 2048)
    assert features["layer1_blk2"].shape == (1, 56 * 56, 256)
    # 11 maps. 4 does not divide 14 (layer3, its blocks 2, 4, 6); 7 (layer4, its block 2) has no patches.
    assert len(features) == 5 * 7 + 4 * 5 + 2 * 3


def test_wrong_weight_files(tmp_path, capsys):
    path, state = tmp_path / "weights.pth", torchvision_state()

    def wrong(content, message, **options):
        torch.save(content, path)
        fails(lambda: Backbone.resnet50(path, **options), message)

    fails(lambda: Backbone.resnet50(tmp_path / "none.pth"), "none.pth does not exist")
    fails(lambda: Backbone.resnet50(path, layout="mocco"), "layout='mocco' is not known: did you mean 'moco'")
    wrong({"state_dict": state}, "set layout='simclr' or layout='torchvision'")
    wrong(state | {"layer5.weight": torch.ones(1)}, "layout 'torchvision'; unknown: layer5.weight$")
    lost = {n: t for n, t in state.items() if n not in ("bn1.bias", "layer4.2.conv3.weight")}
    wrong(lost, "layout 'torchvision'; missing: bn1.bias, layer4.2.conv3.weight$")
    wrong(state, "layout 'moco'; unknown: .* more; missing: module.encoder_q.conv1.weight", layout="moco")
    wrong({"encoder.0": torch.ones(1)}, "is not a ResNet-50 of a known layout .*: it holds encoder.0 ...")
    wrong(
        state | {"layer1.0.conv2.weight": torch.ones(4, 4, 1, 1)},
        r"has shape \[4, 4, 1, 1\], expected \[4, 4, 3, 3\]",
    )
    wrong(state | {"bn1.bias": 3}, "bn1.bias is of type int, expected a tensor")
    wrong([1, 2], "holds a list, expected a state dict")
    wrong({"state_dict": Evil()}, "it is not loaded, because that would execute code")
    assert capsys.readouterr().out == ""
    for name in ("weights.pth", "weights.safetensors"):
        path = tmp_path / name
        save_file(state, path) if name.endswith("safetensors") else torch.save(state, path)
        path.write_bytes(path.read_bytes()[:5000])
        fails(lambda path=path: Backbone.resnet50(path), "damaged|cannot be read as a state dict")
