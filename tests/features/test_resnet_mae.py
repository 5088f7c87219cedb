import json
from pathlib import Path

import numpy as np
import pytest
import torch

from driftgen.errors import InputError
from driftgen.features import ResNetMAE
from driftgen.interop.flax_msgpack import read_parameters
from driftgen.interop.mae_names import official_mae_arguments, official_mae_names
from tests.support.mae_weights import recipe, to_ours, to_theirs

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "03_mae.npz")
CASES = json.loads((DATA / "03_mae.json").read_text())["configs"]
LATENT, PIXEL, ENCODER = "mae_b32_2222", "mae_pixel_b32_2222_p8", "mae_enc_b8_2222"
PRESETS = {
    "latent-256": "inventory_256_3463_latent",
    "latent-640": "inventory_640_3463_latent",
    "pixel-640": "inventory_640_3463_pixel_p8",
}
# In the golden one unit of the decoder, whose exact value is 6e-7 below 0, was rounded to the other side of
# its ReLU: (module, position in [B, C, H, W]).
ROUNDED_UNIT = {LATENT: ("decoder.ups.1.proj.gn", 24345)}


def golden_model(case, dtype=torch.float32):
    config, shapes = CASES[case]["config"], CASES[case]["param_shapes"]
    options = official_mae_arguments(config)
    if case == ENCODER:
        options |= {"decoder": False, "num_classes": None}
    model = ResNetMAE(**options)
    names = official_mae_names(config, encoder_only=case == ENCODER)
    assert set(names) == set(shapes)
    model.load_state_dict({names[path]: to_ours(recipe(path, shape)) for path, shape in shapes.items()})
    return model.to(dtype), names


def golden_input(case, dtype=torch.float32):
    if f"{case}/x" in GOLDEN:
        x = GOLDEN[f"{case}/x"]
    else:
        x = GOLDEN[f"{case}/x_u8"].astype(np.float32) / np.float32(127.5) - np.float32(1)
    return torch.from_numpy(x).to(dtype).permute(0, 3, 1, 2).contiguous()


def deviation(key, got):
    """Largest deviation from a stored array or its stored summary, and the largest value in it."""
    got = got.detach().double().numpy()
    if key in GOLDEN:
        want = GOLDEN[key].astype(np.float64)
        return np.abs(got - want).max(), np.abs(want).max()
    flat = got.reshape(-1)
    samples = [flat[:64], flat[np.linspace(0, flat.size - 1, 256).astype(np.int64)]]
    stats = [flat.mean(), flat.std(), flat.sum(), (flat**2).sum(), flat.min(), flat.max()]
    want = GOLDEN[f"{key}:stats"]
    size = np.array([1, 1, flat.size, flat.size, 1, 1])
    largest = np.abs(want[4:]).max()
    off = [np.abs(np.array(stats) / size - want / size).max() / max(1.0, largest)]
    for got_part, part in zip(samples, ("first64", "strided256"), strict=True):
        off.append(np.abs(got_part - GOLDEN[f"{key}:{part}"]).max())
    return max(off), largest


def assert_close(key, got, tolerance=1e-5):
    off, largest = deviation(key, got)
    assert off <= tolerance * max(1.0, largest), f"{key}: {off:.2e} where values reach {largest:.2e}"


def assert_relatively_close(key, got, tolerance=1e-5):
    off, largest = deviation(key, got)
    assert off <= tolerance * largest, f"{key}: {off:.2e} where values reach {largest:.2e}"


# --- the released code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", [LATENT, PIXEL, ENCODER])
def test_features(case, dtype):
    """1e-5 on every feature, relative to its largest value where that is above 1 (maps reach 6)."""
    model, _ = golden_model(case, dtype)
    x = golden_input(case, dtype).requires_grad_()
    features = model.features(x)
    stored = CASES[case]["activations"]
    assert {name: list(f.shape) for name, f in features.items()} == {n: s["shape"] for n, s in stored.items()}
    assert len(features) == CASES[case]["n_features"]
    assert sum(f.shape[1] for f in features.values()) == CASES[case]["total_vectors"]
    for name, feature in features.items():
        assert_close(f"{case}/act/{name}", feature)
    total = sum(feature.square().mean() for feature in features.values())
    assert_close(f"{case}/sum_mean_sq_features", total)
    total.backward()
    tolerance = 1e-5 if dtype == torch.float64 else 2e-5
    assert_relatively_close(f"{case}/grad_x", x.grad.permute(0, 2, 3, 1).contiguous(), tolerance)


@pytest.mark.parametrize("weight", [0.0, 0.1])
@pytest.mark.parametrize("case", [LATENT, PIXEL])
def test_loss_and_metrics(case, weight):
    model, _ = golden_model(case)
    mask = torch.from_numpy(GOLDEN[f"{case}/mask"]).permute(0, 3, 1, 2)
    out = model(golden_input(case), mask, torch.from_numpy(GOLDEN[f"{case}/labels"]), weight)
    got = {
        "mean": out.loss,
        "loss": out.per_sample,
        "recon_loss": out.recon_loss,
        "cls_loss": out.cls_loss,
        "accuracy": out.accuracy,
        "mask_ratio": out.mask_ratio,
    }
    for name, value in got.items():
        assert_close(f"{case}/loss_lam{weight}/{name}", value)


def gradients(case, weight, dtype, flip=None):
    """Gradients of the mean loss under the release's names, and their global norm."""
    model, names = golden_model(case, dtype)
    if flip is not None:
        module, position = flip

        norm = model.get_submodule(module)
        normalize = norm.forward

        def other_side(x, relu):
            output = normalize(x)
            value = output.detach().flatten()[position]
            assert abs(value) < 1e-6
            assert relu
            shift = torch.zeros_like(output).flatten()
            shift[position] = -2 * value
            return (output + shift.view_as(output)).relu()

        norm.forward = other_side
    mask = torch.from_numpy(GOLDEN[f"{case}/mask"]).permute(0, 3, 1, 2).to(dtype)
    labels = torch.from_numpy(GOLDEN[f"{case}/labels"])
    model.loss(golden_input(case, dtype), mask, labels, weight).loss.backward()
    parameters = dict(model.named_parameters())
    norm = torch.stack([p.grad.double().square().sum() for p in parameters.values()]).sum().sqrt()
    return {path: to_theirs(parameters[name].grad) for path, name in names.items()}, norm


def stored_gradients(case, weight):
    prefix = f"{case}/loss_lam{weight}/grad/"
    return sorted({key[len(prefix) :].split(":")[0] for key in GOLDEN.files if key.startswith(prefix)})


@pytest.mark.parametrize("weight", [0.0, 0.1])
@pytest.mark.parametrize("case", [LATENT, PIXEL])
def test_gradients(case, weight):
    """1e-5 of the largest entry, in float64, so that no other unit than the golden's is rounded over 0."""
    got, norm = gradients(case, weight, torch.float64, ROUNDED_UNIT.get(case))
    prefix = f"{case}/loss_lam{weight}"
    paths = stored_gradients(case, weight)
    assert len(paths) == 7
    for path in paths:
        assert_relatively_close(f"{prefix}/grad/{path}", got[path])
    assert_relatively_close(f"{prefix}/g_norm", norm)


@pytest.mark.parametrize("case", [LATENT, PIXEL])
def test_gradients_in_float32(case):
    """Accuracy of single precision: a unit on the wrong side of its ReLU costs up to 1%."""
    got, norm = gradients(case, 0.1, torch.float32)
    for path in stored_gradients(case, 0.1):
        assert_relatively_close(f"{case}/loss_lam0.1/grad/{path}", got[path], 1e-2)
    assert_relatively_close(f"{case}/loss_lam0.1/g_norm", norm, 1e-3)


def test_bfloat16():
    """The types are the release's; values differ by no more than bfloat16 does from float32."""
    model, _ = golden_model(ENCODER)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        features = model.features(golden_input(ENCODER))
    types = {name: str(f.dtype).removeprefix("torch.") for name, f in features.items()}
    assert types == CASES[ENCODER]["bf16_dtypes"]
    assert list(types) == list(CASES[ENCODER]["bf16_dtypes"])
    for key in (k for k in GOLDEN.files if "/bf16/" in k):
        name = key.rsplit("/", 1)[-1]
        off, _ = deviation(key, features[name])
        if name in ("norm_x", "conv1_mean"):
            assert off <= 2**-8
        assert off <= 1.5 * np.abs(GOLDEN[key] - GOLDEN[f"{ENCODER}/act/{name}"]).max(), name


def test_whole_model_in_bfloat16():
    model, x = small().bfloat16(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        features = model.features(x)
        out = model.loss(x, labels=torch.tensor([1, 2]), cls_weight=0.1)
    assert {f.dtype for n, f in features.items() if "_std" in n} == {torch.float32}
    assert {f.dtype for n, f in features.items() if "_std" not in n} == {torch.bfloat16}
    assert {t.dtype for t in vars(out).values()} == {torch.float32}


def test_names_cover_the_artifact():
    folder = DATA / "artifacts" / ENCODER / "params_ema"
    tensors = read_parameters(folder / "ema_params.msgpack")
    config = json.loads((folder / "metadata.json").read_text())["model_config"]
    names = official_mae_names(config, encoder_only=True)
    assert set(tensors) == set(names)
    model, _ = golden_model(ENCODER)
    for path, name in names.items():
        assert torch.equal(to_ours(tensors[path].numpy()), model.state_dict()[name])


@pytest.mark.parametrize("blocks", [(3, 4, 6, 3), (1, 2), (2,)])
def test_names_cover_the_model(blocks):
    config = {"layers": blocks, "in_channels": 4, "base_channels": 32, "patch_size": 2}
    config |= {"input_patch_size": 1, "num_classes": 7}
    with torch.device("meta"):
        model = ResNetMAE(**official_mae_arguments(config))
    names = official_mae_names(config)
    assert sorted(names.values()) == sorted(model.state_dict())


@pytest.mark.parametrize("preset", PRESETS)
def test_full_size(preset):
    want = CASES[PRESETS[preset]]
    with torch.device("meta"):
        model = ResNetMAE.preset(preset)
        side = 256 if preset.startswith("pixel") else 32
        features = model.features(torch.empty(1, model.in_channels, side, side))
        out = model.loss(torch.empty(1, model.in_channels, side, side))
    assert out.loss.shape == ()
    assert sum(p.numel() for p in model.parameters()) == want["full_params"]
    assert sum(p.numel() for p in model.encoder.parameters()) == want["encoder_params"]
    assert {n: list(f.shape) for n, f in features.items()} == {n: s for n, (s, _) in want["shapes"].items()}
    assert len(features) == want["n_features_mae"] == 85
    assert sum(f.shape[1] for f in features.values()) == want["vectors_mae"] == 6733
    everything = sum(f.shape[1] * f.shape[2] for f in features.values()) + want["global_feature"][-1]
    assert everything == want["elements_per_image"]


# --- our own freedom ------------------------------------------------------------------------------------


def small(**options):
    return ResNetMAE(**{"in_channels": 3, "base_channels": 8, "blocks": (1, 2), "num_classes": 5} | options)


def test_feature_switches():
    model, x = small(), torch.randn(2, 3, 8, 8)
    maps = model.encode(x)
    assert list(maps) == ["conv1", "layer1", "layer2", "layer2_blk2"]
    assert maps["layer2"].shape == (2, 16, 4, 4)
    assert list(model.encode(x, every_k_block=0)) == ["conv1", "layer1", "layer2"]
    assert list(model.encode(x, every_k_block=1))[3:] == ["layer1_blk1", "layer2_blk1", "layer2_blk2"]
    assert len(model.features(x)) == 1 + 7 * 4
    assert len(model.features(x, patch_sizes=(2,))) == 1 + 5 * 4
    assert len(model.features(x, patch_sizes=(), norm_x=False)) == 3 * 4
    assert set(model.features(x, every_k_block=0, mean_std=False, patch_sizes=())) == {"norm_x", *maps} - {
        "layer2_blk2"
    }
    assert list(model.features(x, vectors=False, mean_std=False, patch_sizes=())) == ["norm_x"]


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 8, 8), {"in_channels": 1, "base_channels": 16, "blocks": (1, 1, 1, 1)}),
        ((1, 8, 8), {"in_channels": 1, "base_channels": 24, "blocks": (2, 2)}),
        ((3, 32, 32), {"base_channels": 12, "blocks": (1, 1, 1, 1)}),
        ((3, 64, 64), {"base_channels": 8, "blocks": (1, 1, 1, 1), "patchify": 2}),
        ((3, 64, 64), {"base_channels": 8, "blocks": (1, 1, 1, 1)}),
        ((3, 12, 20), {"blocks": (1, 1, 1)}),
        ((3, 9, 15), {"blocks": (1, 1, 1), "mask_patch": 4}),
    ],
)
def test_other_sizes(shape, options):
    model = small(**options)
    x = torch.randn(2, *shape, requires_grad=True)
    features = model.features(x)
    for name, feature_map in model.encode(x).items():
        for p in (2, 4):
            divides = feature_map.shape[2] % p == 0 and feature_map.shape[3] % p == 0
            assert (f"{name}_mean_{p}" in features) == (f"{name}_std_{p}" in features) == divides
    assert all(f.ndim == 3 and f.shape[0] == 2 and f.isfinite().all() for f in features.values())
    out = model.loss(x, labels=torch.tensor([0, 4]), cls_weight=0.5)
    (out.loss + sum(f.square().mean() for f in features.values())).backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().sum() > 0
    assert all(p.grad is not None for p in model.parameters())
    p = model.patchify
    assert model.reconstruct(x, model.sample_mask(2, size=(shape[1] // p, shape[2] // p))).shape == (
        (2, 3 * p * p if shape[0] == 3 else 1, shape[1] // p, shape[2] // p)
    )


def test_features_do_not_mix_samples():
    model, x = small(), torch.randn(3, 3, 8, 8)
    together, alone = model.features(x), model.features(x[1:2])
    for name, feature in alone.items():
        assert torch.allclose(together[name][1:2], feature, atol=1e-5)


def test_norm_of_an_empty_image():
    """√(mean x² + 1e-6): the gradient stays finite at 0."""
    x = torch.zeros(1, 3, 8, 8, requires_grad=True)
    norm = small().features(x)["norm_x"]
    assert torch.allclose(norm, torch.full((1, 1, 3), 1e-3))
    norm.sum().backward()
    assert (x.grad == 0).all()


def test_mask():
    model = small()
    mask = model.sample_mask(64, torch.Generator().manual_seed(3), size=(32, 32))
    assert mask.shape == (64, 1, 32, 32)
    assert set(mask.unique().tolist()) == {0.0, 1.0}
    assert abs(mask.mean() - 0.5) < 0.02
    blocks = mask.unfold(2, 2, 2).unfold(3, 2, 2)
    assert (blocks == blocks[..., :1, :1]).all()
    assert torch.equal(mask, model.sample_mask(64, torch.Generator().manual_seed(3)))
    assert torch.equal(mask[:5], model.sample_mask(5, torch.Generator().manual_seed(3)))
    assert abs(small(mask_ratio=0.25).sample_mask(64).mean() - 0.25) < 0.02
    assert small(mask_patch=3).sample_mask(1, size=(7, 8)).shape == (1, 1, 7, 8)


def test_masked_input_is_not_seen():
    model, x = small(), torch.randn(2, 3, 8, 8)
    mask = model.sample_mask(2, torch.Generator().manual_seed(0), size=(8, 8))
    other = torch.where(mask.bool(), torch.randn_like(x), x)
    assert torch.equal(model.reconstruct(x, mask), model.reconstruct(other, mask))
    assert torch.equal(model.reconstruct(x, mask), model.reconstruct(x, mask.bool()))


def test_loss_is_a_sum_over_channels_of_masked_locations():
    model, x = small(), torch.randn(2, 3, 8, 8)
    mask = model.sample_mask(2, torch.Generator().manual_seed(0), size=(8, 8))
    out = model.loss(x, mask)
    error = (model.reconstruct(x, mask) - x).square().sum(1)
    for i in range(2):
        assert torch.allclose(out.recon_loss[i], error[i][mask[i, 0].bool()].mean())
    assert out.cls_loss is None
    assert out.accuracy is None
    drawn = model.loss(x, generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn.loss, out.loss)
    assert model.loss(x, torch.zeros_like(mask)).loss == 0


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"in_channels": 0}, "in_channels"),
        ({"base_channels": 0}, "base_channels"),
        ({"blocks": ()}, "blocks"),
        ({"blocks": (2, 0)}, "blocks"),
        ({"patchify": 0}, "patchify"),
        ({"mask_ratio": 0.0}, "mask_ratio"),
        ({"mask_ratio": 1.5}, "mask_ratio"),
        ({"mask_patch": 0}, "mask_patch"),
        ({"num_classes": 0}, "num_classes"),
    ],
)
def test_wrong_options(options, argument):
    with pytest.raises(InputError, match=f"^{argument}="):
        small(**options)


X = torch.zeros(2, 3, 8, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ResNetMAE.preset("latent-255"), "name='latent-255' is not known: did you mean 'latent-256'"),
        (lambda: small().features(X[0]), "x has shape"),
        (lambda: small().features(torch.zeros(2, 4, 8, 8)), "x has shape"),
        (lambda: small().features(X.byte()), "x is torch.uint8"),
        (lambda: small(patchify=3).features(X), "x is 8x8 pixels: patchify=3"),
        (lambda: small(blocks=(1,) * 5).features(X), "x is 8x8 pixels: 5 stages with patchify=1 need 16x16"),
        (
            lambda: small(blocks=(1,) * 4, base_channels=4).features(X),
            "x is 8x8 pixels: with base_channels=4",
        ),
        (lambda: small().features(X, every_k_block=-1), "every_k_block=-1"),
        (lambda: small().features(X, patch_sizes=(0,)), r"patch_sizes=\(0,\)"),
        (lambda: small().sample_mask(0), "n=0"),
        (lambda: small().loss(X, torch.zeros(2, 1, 4, 4)), r"mask has shape \[2, 1, 4, 4\]"),
        (lambda: small().loss(X, cls_weight=0.1), "labels is None"),
        (lambda: small().loss(X, labels=torch.tensor([0, 5])), "labels holds 5: num_classes=5"),
        (lambda: small().loss(X, labels=torch.tensor([0.0, 1.0])), "labels is torch.float32"),
        (lambda: small().loss(X, labels=torch.tensor([0])), "labels is torch.int64"),
        (lambda: small(num_classes=None).loss(X, labels=torch.tensor([0, 1])), "labels is given"),
        (lambda: small(decoder=False).loss(X), "decoder=False"),
    ],
)
def test_wrong_input(call, message):
    with pytest.raises(InputError, match=f"^{message}") as error:
        call()
    assert "\n" not in str(error.value)
