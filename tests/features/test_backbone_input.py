"""Preprocessing of backbones, wrong arguments, and missing transformers."""

import importlib

import pytest
import torch

from driftgen.features.backbones import Backbone
from driftgen.interop.convnext_names import convnext_config_from
from tests.support.backbone_networks import (
    golden_model,
    normalized,
    tiny_resnet,
    torchvision_state,
)
from tests.support.helpers import fails

X = torch.zeros(1, 3, 32, 32)


def test_input_is_not_clipped_and_gray_is_repeated():
    model = golden_model()
    model.size = None
    x = torch.randn(1, 1, 32, 32) * 3
    assert torch.allclose(model.preprocess(x), normalized(x.repeat(1, 3, 1, 1)), atol=1e-5)
    color, gray = model.features(x.repeat(1, 3, 1, 1)), model.features(x)
    assert all(torch.equal(color[name], feature) for name, feature in gray.items())


def test_gradient_of_the_resize_in_float64():
    model = golden_model(torch.float64)
    for size in ((5, 4), (9, 12)):
        model.size = size
        model._target = lambda height, width, size=size: size
        x = torch.randn(1, 3, 7, 6, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(model.preprocess, x)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: golden_model().features(X, every_k_block=-1), "^every_k_block=-1"),
        (lambda: golden_model().features(X, patch_sizes=(0,)), "^patch_sizes="),
        (
            lambda: Backbone.from_convnext((1,), (8,), size=3).features(X),
            "^size=3x3 is too small: .* 4 pixels",
        ),
        (lambda: Backbone.from_convnext((1, 1), (8,)), r"^depths=\(1, 1\) and dims=\(8,\)"),
        (lambda: Backbone.from_convnext((0,), (8,)), "^depths="),
        (lambda: Backbone.from_convnext((1,), (8,), 0), "^num_classes=0"),
        (lambda: Backbone.from_convnext((1,), (8,), size=0), "^size=0"),
        (lambda: Backbone(tiny_resnet().resnet, mean=(0, 0)), "^mean="),
        (lambda: Backbone(tiny_resnet().resnet, std=(1, 1, 0)), "^mean=.* std above 0"),
        (
            lambda: Backbone(tiny_resnet().resnet, stages=["stage1"]),
            r"^stages=\['stage1'\] applies to folders only",
        ),
        (lambda: Backbone(tiny_resnet()), "^ResNetForImageClassification has no feature maps"),
        (lambda: Backbone(torch.nn.Linear(1, 1)), "^Linear has no feature maps"),
        (lambda: convnext_config_from({}), "downsample_layers_0/layers_0/kernel is missing"),
        (
            lambda: convnext_config_from({"downsample_layers_0/layers_0/kernel": torch.ones(4, 4, 3, 8)}),
            "stages_0/layers_0 is missing",
        ),
        (
            lambda: Backbone(tiny_resnet().resnet).options(),
            "^a resnet backbone cannot be saved: only ConvNeXt-V2 can",
        ),
    ],
)
def test_wrong_input(call, message):
    fails(call, message)


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
        fails(call, r"(?m)^Backbone needs transformers: pip install 'driftgen\[encoders\]'$")
