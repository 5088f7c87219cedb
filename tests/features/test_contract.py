"""The contract of every encoder: φ(x) is a dict of [B, V, D], independent per sample and differentiable."""

from dataclasses import dataclass, field

import pytest
import torch

from driftgen.features import Backbone, DecodeFirst, EfficientNetLite, Encoder, FeatureStack
from driftgen.tokenizers import TinyVAE
from tests.support.autoencoders import taesd_states
from tests.support.backbone_networks import tiny_convnext, tiny_dinov2, torchvision_state
from tests.support.efficientnet_weights import efficientnet_state
from tests.support.helpers import fails
from tests.support.mae_weights import small_mae


@dataclass
class Case:
    """An encoder, the shape of its input, the number of its features and the shape [V, D] of some."""

    build: object
    shape: tuple[int, int, int]
    count: int
    declared: dict = field(default_factory=dict)
    frozen: bool = True


def mae(_):
    return small_mae(blocks=(1, 2))


def convnext(_):
    return Backbone(tiny_convnext().convnextv2, size=32)


def dinov2(folder):
    tiny_dinov2().save_pretrained(folder)
    return Backbone(folder, size=56)


def resnet50(folder):
    torch.save(torchvision_state(), folder / "weights.pth")
    return Backbone.resnet50(folder / "weights.pth", size=64)


def efficientnet_lite(folder):
    torch.save(efficientnet_state(), folder / "weights.pth")
    return EfficientNetLite(folder / "weights.pth", size=64)


def decode_first(folder):
    paths = [folder / "encoder.pth", folder / "decoder.pth"]
    for state, path in zip(taesd_states(), paths, strict=True):
        torch.save(state, path)
    return DecodeFirst(small_mae(blocks=(1, 1)), TinyVAE.from_files(*paths))


def stack(_):
    networks = {"mae": (small_mae(blocks=(1, 1)), {"patch_sizes": ()}), "convnext": convnext(_)}
    return FeatureStack(networks)


CASES = {
    "ResNetMAE": Case(
        mae,
        (3, 8, 8),
        1 + 4 * 7,
        {"conv1": (64, 8), "layer2_blk2_std_2": (4, 16), "norm_x": (1, 3)},
        frozen=False,
    ),
    "ConvNeXt": Case(
        convnext,
        (3, 40, 24),
        13,
        {"convenxt_stage_1": (16, 12), "global_mean": (1, 24), "global_std": (1, 24)},
    ),
    "DINOv2": Case(dinov2, (3, 48, 48), 4 * 7, {"stage2": (16, 16), "stage8_mean_4": (1, 16)}),
    "ResNet-50": Case(resnet50, (3, 32, 32), 9 * 7 + 2 * 5, {"layer1": (256, 16), "layer4_mean": (1, 128)}),
    "EfficientNet-lite0": Case(
        efficientnet_lite, (3, 32, 32), 3 * 7 + 5, {"stage2": (256, 6), "stage7_std_2": (1, 14)}
    ),
    "DecodeFirst": Case(decode_first, (6, 2, 4), 1 + 3 * 7, {"conv1": (128, 8), "layer2_mean_4": (2, 16)}),
    "FeatureStack": Case(
        stack,
        (3, 32, 32),
        1 + 10 + 13,
        {"global": (1, 3072), "mae/layer1": (1024, 8), "convnext/global_std": (1, 24)},
    ),
}


@pytest.fixture(params=CASES, scope="module")
def case(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def encoder(case, tmp_path_factory):
    torch.manual_seed(0)
    return case.build(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def x(case):
    return torch.randn(3, *case.shape, generator=torch.Generator().manual_seed(1)).clamp(-2, 2)


def test_features_are_sets_of_vectors_of_the_declared_shape(encoder, case, x):
    assert isinstance(encoder, Encoder)
    features = encoder.features(x)
    assert len(features) == case.count
    assert {f.ndim for f in features.values()} == {3}
    assert {len(f) for f in features.values()} == {3}
    assert {name: tuple(features[name].shape[1:]) for name in case.declared} == case.declared
    assert all(f.isfinite().all() for f in features.values())


def test_names_and_shapes_do_not_depend_on_the_batch(encoder, x):
    together, alone = encoder.features(x), encoder.features(x[:1])
    assert list(together) == list(alone) == list(encoder.features(x))
    assert [f.shape[1:] for f in together.values()] == [f.shape[1:] for f in alone.values()]


def test_samples_are_independent(encoder, x):
    with torch.no_grad():
        together = encoder.features(x)
        parts = [encoder.features(part) for part in (x[:1], x[1:])]
    for name, feature in together.items():
        joined = torch.cat([part[name] for part in parts])
        assert torch.allclose(feature, joined, atol=1e-4, rtol=1e-4), name


def test_gradients_reach_every_sample_and_change_nothing(encoder, case, x):
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    x.requires_grad_()
    features = encoder.features(x)
    assert all(f.requires_grad for f in features.values())
    sum(f.square().mean() for f in features.values()).backward()
    assert x.grad.isfinite().all()
    assert (x.grad.abs().amax((1, 2, 3)) > 0).all()
    assert all(torch.equal(tensor, before[name]) for name, tensor in encoder.state_dict().items())
    if case.frozen:
        assert all(p.grad is None for p in encoder.parameters())
    encoder.zero_grad()


def test_frozen_encoders_stay_frozen(encoder, case):
    if not case.frozen:
        assert all(p.requires_grad for p in encoder.parameters())
        return
    assert not any(p.requires_grad for p in encoder.parameters())
    assert encoder.train() is encoder
    assert not any(module.training for module in encoder.modules())


def test_dtype_follows_the_module(encoder, x):
    single = encoder.features(x)
    assert {f.dtype for f in single.values()} == {torch.float32}
    try:
        double = encoder.to(torch.float64).features(x.double())
    finally:
        encoder.to(torch.float32)
    assert {f.dtype for f in double.values()} == {torch.float64}
    for name, feature in single.items():
        assert torch.allclose(feature.double(), double[name], atol=1e-3, rtol=1e-3), name


def test_wrong_input_is_a_one_line_error(encoder, x):
    fails(lambda: encoder.features(torch.cat([x, x], dim=1)), r"^(x|latents) has shape \[3, ")
    fails(lambda: encoder.features(x[0]), r"^(x|latents) has shape \[")
    fails(lambda: encoder.features(x[..., :0]), r"^(x|latents) (has shape|is) ")
    fails(lambda: encoder.features(x.byte()), "^(x|latents) is torch.uint8")
