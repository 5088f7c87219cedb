"""EfficientNet-lite0 from a file of published weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from driftgen.features import EfficientNetLite
from tests.support.backbone_networks import Evil
from tests.support.efficientnet_weights import (
    LITE_BLOCKS,
    LITE_KERNELS,
    LITE_STRIDES,
    efficientnet_state,
)
from tests.support.helpers import fails


def reference_maps(state, x):
    """Compute the maps in float64, batch norms unfolded, "SAME" padding as TensorFlow defines it."""
    state = {name: t.double() for name, t in state.items()}

    def unit(x, convolution, norm, stride=1, groups=1):
        weight = state[f"{convolution}.weight"]
        kernel, (height, width) = weight.shape[-1], x.shape[2:]
        down = max((math.ceil(height / stride) - 1) * stride + kernel - height, 0)
        right = max((math.ceil(width / stride) - 1) * stride + kernel - width, 0)
        x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
        x = F.conv2d(x, weight, stride=stride, groups=groups)
        parts = (state[f"{norm}.{part}"] for part in ("running_mean", "running_var", "weight", "bias"))
        return F.batch_norm(x, *parts, eps=1e-3)

    x, maps, index = unit(x, "_conv_stem", "_bn0", 2).clamp(0, 6), {}, 0
    for stage, blocks in enumerate(LITE_BLOCKS):
        for k in range(blocks):
            block, stride = f"_blocks.{index}", LITE_STRIDES[stage] if k == 0 else 1
            y = unit(x, f"{block}._expand_conv", f"{block}._bn0").clamp(0, 6) if index else x
            weight = state[f"{block}._depthwise_conv.weight"]
            assert weight.shape[-1] == LITE_KERNELS[stage]
            y = unit(y, f"{block}._depthwise_conv", f"{block}._bn1", stride, len(weight)).clamp(0, 6)
            y = unit(y, f"{block}._project_conv", f"{block}._bn2")
            x = x + y if stride == 1 and x.shape == y.shape else y
            index += 1
        maps[f"stage{stage + 1}"] = x
    return maps


@pytest.mark.parametrize("size", [64, (61, 47)])  # odd sides pad both ends of a strided convolution
def test_maps_agree_with_a_literal_network(tmp_path, size):
    state = efficientnet_state()
    torch.save(state, tmp_path / "weights.pth")
    phi = EfficientNetLite(tmp_path / "weights.pth", size=None, stages=range(1, 8)).double()
    height, width = (size, size) if isinstance(size, int) else size
    x = torch.randn(2, 3, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    seen = ((x + 1) / 2 * 255 - 127) / 128
    want, maps = reference_maps(state, seen), phi.encode(x)
    assert list(maps) == list(want)
    for name, feature_map in maps.items():
        assert feature_map.shape == want[name].shape
        assert torch.allclose(feature_map, want[name], rtol=1e-4, atol=1e-5), name
        assert want[name].std() > 0.01
    assert maps["stage7"].shape[2:] == (math.ceil(height / 32), math.ceil(width / 32))


def test_resizing_gray_images_and_stages(tmp_path):
    state = efficientnet_state()
    save_file(state, tmp_path / "weights.safetensors")
    phi = EfficientNetLite(tmp_path / "weights.safetensors", size=128, stages=(3, 2))
    x = torch.rand(2, 1, 32, 32) * 2 - 1
    features = phi.features(x, patch_sizes=())
    assert list(features) == ["stage2", "stage2_mean", "stage2_std", "stage3", "stage3_mean", "stage3_std"]
    assert features["stage2"].shape == (2, 1024, 6)
    large = F.interpolate(x.expand(-1, 3, -1, -1), size=128, mode="bilinear")
    native = EfficientNetLite(tmp_path / "weights.safetensors", size=None, stages=(3, 2))
    assert torch.allclose(features["stage3"], native.features(large)["stage3"], atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        low = phi.features(x)["stage3_mean"]
    assert low.dtype == torch.bfloat16
    assert torch.allclose(low.float(), features["stage3_mean"], atol=0.1, rtol=0.1)


def test_wrong_weight_files_and_options(tmp_path, capsys):
    path, state = tmp_path / "weights.pth", efficientnet_state()

    def wrong(content, message):
        torch.save(content, path)
        fails(lambda: EfficientNetLite(path), message)

    fails(lambda: EfficientNetLite(tmp_path / "none.pth"), "none.pth does not exist")
    wrong(state | {"_blocks.16.x": torch.ones(1)}, "is not an EfficientNet-lite0; unknown: _blocks.16.x$")
    lost = {name: t for name, t in state.items() if name != "_blocks.3._bn1.bias"}
    wrong(lost, "missing: _blocks.3._bn1.bias$")
    wrong(state | {"_bn0.bias": 3}, "_bn0.bias is not a tensor of the expected number of dimensions")
    name = "_blocks.3._depthwise_conv.weight"
    wrong(state | {name: state[name][:, :, :3, :3]}, "_blocks.3._depthwise_conv has shape")
    wrong(state | {"_bn0.bias": torch.ones(3)}, "_conv_stem has shape")
    wrong({"net": Evil()}, "it is not loaded, because that would execute code")
    assert capsys.readouterr().out == ""
    torch.save(state, path)
    fails(lambda: EfficientNetLite(path, size=0), "size=0 must be 1 to 4096 pixels")
    fails(lambda: EfficientNetLite(path, stages=(8,)), r"stages=\[8\] must be chosen from 1 to 7")
    fails(lambda: EfficientNetLite(path, stages=()), r"stages=\[\] must be chosen from 1 to 7")
