"""What every backbone does with its input: frozen weights, no clipping, wrong calls told in one line."""

import importlib

import pytest
import torch

from driftgen.features.backbones import Backbone
from driftgen.interop.convnext_names import convnext_config_from
from tests.support.backbone_networks import (
    golden_model,
    normalised,
    tiny_convnext,
    tiny_dinov2,
    tiny_resnet,
    torchvision_state,
)
from tests.support.helpers import fails

X = torch.zeros(1, 3, 32, 32)


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
        fails(call, r"^Backbone needs transformers: pip install 'driftgen\[encoders\]'$")
