"""Combined encoders: the release's pixel features, decoding first, switches and errors."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.features import DecodeFirst, FeatureStack, ResNetMAE
from driftgen.interop.mae_names import official_mae_names
from tests.support.mae_weights import recipe, to_ours, to_theirs

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "04_convnext.npz")
RECORD = json.loads((DATA / "04_convnext.json").read_text())["activation_fn"]


@pytest.fixture(scope="module")
def pixel_stack():
    config = {"layers": (1, 1, 2, 1)}
    mae = ResNetMAE(3, 8, blocks=config["layers"], patchify=4, decoder=False)
    state = mae.state_dict()
    for path, name in official_mae_names(config, encoder_only=True).items():
        state[name] = to_ours(recipe(path, tuple(to_theirs(state[name]).shape)))
    mae.load_state_dict(state)
    return FeatureStack([mae, dg.load_official(DATA / "artifacts" / "convnext_tiny")])


def test_pixel_features_match_the_release(pixel_stack):
    x = torch.tensor(GOLDEN["activation_fn/x"]).permute(0, 3, 1, 2)
    features = pixel_stack.features(x)
    assert set(features) == set(RECORD["key_order"])
    for name, value in features.items():
        key = f"activation_fn/act/{name}"
        if key in GOLDEN:
            pairs = [(value.numpy(), GOLDEN[key])]
        else:
            flat = value.numpy().reshape(-1)
            strided = flat[np.linspace(0, flat.size - 1, 256).astype(np.int64)]
            pairs = [(flat[:64], GOLDEN[f"{key}:first64"]), (strided, GOLDEN[f"{key}:strided256"])]
        for got, want in pairs:
            assert np.abs(got - want).max() < 1e-5 * max(1, np.abs(want).max()), name


class Doubling(torch.nn.Module):
    """A tokenizer with a weight in its decoder."""

    def __init__(self):
        super().__init__()
        self.up = torch.nn.ConvTranspose2d(4, 3, 2, stride=2)

    def decode(self, latents):
        return self.up(latents).tanh()


def test_decode_first():
    tokenizer, encoder = Doubling(), ResNetMAE(3, 16, blocks=(1, 1), decoder=False)
    latent = ResNetMAE(4, 16, blocks=(1, 1), decoder=False)
    stack = FeatureStack({"latent": latent, "pixel": DecodeFirst(encoder, tokenizer)})
    z = torch.randn(2, 4, 8, 8, requires_grad=True)
    features = stack.features(z)
    assert features["global"].shape == (2, 1, 256)
    assert features["latent/layer1"].shape == (2, 64, 16)
    assert features["pixel/layer1"].shape == (2, 256, 16)
    torch.testing.assert_close(features["pixel/conv1"], encoder.features(tokenizer.decode(z))["conv1"])
    (gradient,) = torch.autograd.grad(features["pixel/layer2_mean"].square().sum(), z)
    step = 1e-3 * torch.randn_like(z)
    with torch.no_grad():
        ahead, behind = (stack.features(z + s)["pixel/layer2_mean"].square().sum() for s in (step, -step))
    assert (ahead - behind) / 2 == pytest.approx((gradient * step).sum().item(), rel=0.02, abs=1e-4)


def test_switches_for_each_encoder():
    mae = ResNetMAE(3, 16, blocks=(1, 1), decoder=False)
    stack = FeatureStack([(mae, {"patch_sizes": (), "vectors": False})], vanilla=False)
    assert set(stack.features(torch.randn(1, 3, 8, 8))) == {
        "norm_x",
        *(f"{n}_{s}" for n in ("conv1", "layer1", "layer2") for s in ("mean", "std")),
    }


def test_the_loss_takes_a_stack():
    stack = FeatureStack([ResNetMAE(3, 16, blocks=(1, 1), decoder=False)])
    generated = torch.randn(6, 3, 8, 8, requires_grad=True)
    features = {k: v.unflatten(0, (2, 3)) for k, v in stack.features(generated).items()}
    with torch.no_grad():
        real = {k: v.unflatten(0, (2, 3)) for k, v in stack.features(torch.randn(6, 3, 8, 8)).items()}
    dg.DriftingLoss()(features, real).loss.backward()
    assert generated.grad.abs().sum() > 0


def test_convolutions_cast_once_give_what_autocast_gives():
    stack, x = FeatureStack([ResNetMAE(3, 16, blocks=(1, 1), decoder=False)]), torch.randn(2, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = stack.features(x)
        stack.cast_convolutions(torch.bfloat16)
        features = stack.features(x)
    assert {p.dtype for p in stack.parameters()} == {torch.float32, torch.bfloat16}
    for name, value in expected.items():
        assert torch.equal(features[name], value)


def test_errors():
    mae = ResNetMAE(3, 16, blocks=(1, 1), decoder=False)
    with pytest.raises(dg.InputError, match="two encoders have a feature 'norm_x'"):
        FeatureStack([mae, mae]).features(torch.randn(1, 3, 8, 8))
    with pytest.raises(dg.InputError, match="Linear is not an encoder"):
        FeatureStack([torch.nn.Linear(2, 2)])
    with pytest.raises(dg.InputError, match="add an encoder or set vanilla=True"):
        FeatureStack(vanilla=False)
