"""Tokenizers: agreement with diffusers, batching, gradients, freezing, saving, wrong input."""

import json
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from driftgen.errors import InputError
from driftgen.tokenizers import SDVAE, Identity, TinyVAE, Tokenizer, build_tokenizer
from tests.support.autoencoders import X, close, kl_network, seeded, taesd_files, tiny_network
from tests.support.helpers import fails

pytest.importorskip("diffusers")
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def kl(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kl")
    kl_network().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_network().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return taesd_files(tmp_path_factory.mktemp("taesd"))


@pytest.fixture(params=["sd-vae", "tiny", "files"])
def tokenizer(request, kl, tiny, files):
    builders = {
        "sd-vae": lambda: SDVAE(kl),
        "tiny": lambda: TinyVAE(tiny),
        "files": lambda: TinyVAE.from_files(*files),
    }
    return builders[request.param]()


# --- values ---------------------------------------------------------------------------------------------


def test_sd_vae_matches_diffusers(kl):
    network, vae = kl_network(), SDVAE(kl, sample=False)
    assert (vae.latent_channels, vae.factor) == (4, 4)
    with torch.no_grad():
        posterior = network.encode(X).latent_dist
        z = vae.encode(X)
        assert z.shape == (5, 4, 3, 5)
        assert close(z, 0.18215 * posterior.mean)
        assert close(vae.decode(z), network.decode(posterior.mean).sample)
        assert close(SDVAE(kl, sample=False, scale=0.5).encode(X), 0.5 * posterior.mean)
        # The posterior sample uses noise drawn one image at a time.
        generator = seeded(7)
        noise = torch.stack([torch.randn(4, 3, 5, generator=generator) for _ in X])
        want = 0.18215 * (posterior.mean + posterior.std * noise)
        assert not close(want, z)
        assert close(SDVAE(kl).encode(X, seeded(7)), want)


def test_networks_are_cast_without_a_warning(kl, monkeypatch):
    """diffusers would name an empty list of modules that should stay in float32."""
    from diffusers.models import modeling_utils

    said = []
    monkeypatch.setattr(modeling_utils.logger, "warning", said.append)
    assert next(SDVAE(kl, dtype=torch.bfloat16).parameters()).dtype == torch.bfloat16
    assert not said


def test_sd_vae_draws_new_samples(kl):
    vae = SDVAE(kl, batch_size=100)
    with torch.no_grad():
        assert not torch.equal(vae.encode(X), vae.encode(X))
        assert torch.equal(vae.encode(X, seeded()), vae.encode(X, seeded()))
        assert not torch.equal(vae.encode(X, seeded()), vae.encode(X, seeded(1)))
        many = vae.encode(X[:1].expand(400, -1, -1, -1)) / vae.scale
        posterior = kl_network().encode(X[:1]).latent_dist
    assert ((many.mean(0) - posterior.mean[0]) / posterior.std[0]).abs().max() < 0.3
    assert (many.std(0) / posterior.std[0] - 1).abs().max() < 0.2


def test_sd_vae_with_old_names(kl, tmp_path):
    """The published SD-VAE uses diffusers' attention names of 2022."""
    network = kl_network()
    network.save_pretrained(tmp_path)
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(tmp_path / WEIGHTS)
    for new, name in old.items():
        assert any(f"attentions.0.{new}." in key for key in state)
        state = {k.replace(f"attentions.0.{new}.", f"attentions.0.{name}."): v for k, v in state.items()}
    save_file(state, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with torch.no_grad():
        assert torch.equal(SDVAE(tmp_path).encode(X, seeded()), SDVAE(kl).encode(X, seeded()))


def test_tiny_matches_diffusers(tiny):
    network, vae = tiny_network(), TinyVAE(tiny)
    assert (vae.latent_channels, vae.factor) == (5, 4)
    with torch.no_grad():
        z = network.encode(X).latents
        assert close(vae.encode(X), z)
        assert close(vae.decode(z), network.decode(z).sample)
        scaled = TinyVAE(tiny, scale=0.5)
        assert close(scaled.encode(X), 0.5 * z)
        assert close(scaled.decode(0.5 * z), network.decode(z).sample)


def test_identity():
    pixels = Identity()
    assert isinstance(pixels, Tokenizer)
    assert (pixels.latent_channels, pixels.factor) == (3, 1)
    assert torch.equal(pixels.decode(pixels.encode(X.double())), X.double())
    gray = build_tokenizer(Identity(1).options(), None)
    assert gray.encode(X[:, :1]).shape == (5, 1, 12, 20)


# --- batches, gradients, freezing -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 5])
def test_batching_changes_nothing(tokenizer, size):
    with torch.no_grad():
        tokenizer.batch_size = 16
        z = tokenizer.encode(X, seeded())
        images = tokenizer.decode(z)
        seen = []
        hook = tokenizer.network.encoder.register_forward_hook(lambda m, i, o: seen.append(len(o)))
        tokenizer.batch_size = size
        assert close(tokenizer.encode(X, seeded()), z)
        hook.remove()
        assert max(seen) == size
        assert sum(seen) == 5
        assert close(tokenizer.decode(z), images)
        # The same holds for batches that the caller makes.
        generator = seeded()
        assert close(torch.cat([tokenizer.encode(part, generator) for part in X.split(2)]), z)


def test_gradients_flow_only_to_the_input(tokenizer):
    z = tokenizer.encode(X, seeded()).detach()
    gradients = {}
    for size in (16, 2):
        tokenizer.batch_size = size
        x, latent = X.clone().requires_grad_(), z.clone().requires_grad_()
        tokenizer.encode(x, seeded()).square().sum().backward()
        tokenizer.decode(latent).square().sum().backward()
        gradients[size] = x.grad, latent.grad
    for whole, parts in zip(*gradients.values(), strict=True):
        assert (whole.abs().sum((1, 2, 3)) > 0).all()
        assert close(parts, whole)
    assert all(p.grad is None for p in tokenizer.parameters())


def test_decode_gradient_matches_diffusers(kl):
    z = torch.randn(2, 4, 4, 4, generator=seeded())
    a, b = z.clone().requires_grad_(), z.clone().requires_grad_()
    SDVAE(kl, batch_size=1).decode(a).square().mean().backward()
    kl_network().decode(b / 0.18215).sample.square().mean().backward()
    assert close(a.grad / b.grad.abs().max(), b.grad / b.grad.abs().max())


def test_frozen(tokenizer):
    assert isinstance(tokenizer, nn.Module)
    assert isinstance(tokenizer, Tokenizer)
    outer = nn.Sequential(tokenizer).train()
    assert not any(module.training for module in tokenizer.modules())
    assert not any(p.requires_grad for p in outer.parameters())
    assert next(tokenizer.parameters()).dtype == torch.float32


def test_dtype_follows_the_module(tokenizer):
    with torch.no_grad():
        z = tokenizer.encode(X, seeded())
        half = tokenizer.bfloat16()
        assert half.encode(X, seeded()).dtype == half.decode(z).dtype == torch.bfloat16
        assert close(half.encode(X, seeded()).float(), z, 0.1)
        assert half.options()["dtype"] == "bfloat16"
        double = tokenizer.double()
        assert double.encode(X, seeded()).dtype == torch.float64


# --- saving ---------------------------------------------------------------------------------------------


def test_saved_and_built_again(tokenizer, tmp_path):
    tokenizer.scale, tokenizer.batch_size = 0.3, 2
    place = tmp_path / "new" / "tokenizer"
    tokenizer.save(place)
    options = json.loads(json.dumps(tokenizer.options()))
    again = build_tokenizer(options, place)
    assert type(again) is type(tokenizer)
    assert again.options() == tokenizer.options()
    with torch.no_grad():
        z = tokenizer.encode(X, seeded())
        assert torch.equal(again.encode(X, seeded()), z)
        assert torch.equal(again.decode(z), tokenizer.decode(z))
    assert {path.suffix for path in place.iterdir()} <= {".json", ".safetensors"}
    # The saved files do not contain the local path of the weights.
    told = json.dumps(options) + "".join(path.read_text() for path in place.glob("*.json"))
    assert str(tmp_path.parent) not in told
    with pytest.raises(InputError, match="weights are missing"):
        build_tokenizer(options, tmp_path / "nowhere")
    # The name of the Hub repository is preserved.
    assert build_tokenizer({**options, "source": "some/vae"}, place).options()["source"] == "some/vae"
    half = tokenizer.bfloat16()
    half.save(place)
    assert torch.equal(build_tokenizer(half.options(), place).decode(z), half.decode(z))


def test_built_from_a_given_folder(kl, tiny):
    vae = build_tokenizer({"kind": "sd-vae", "source": str(kl), "sample": False, "scale": 0.5})
    assert isinstance(vae, SDVAE)
    assert (vae.sample, vae.scale) == (False, 0.5)
    assert vae.options()["sample"] is False
    assert isinstance(build_tokenizer({"kind": "tiny", "source": str(tiny)}), TinyVAE)


# --- wrong input ----------------------------------------------------------------------------------------


def test_wrong_images(tokenizer):
    n = tokenizer.latent_channels
    fails(lambda: tokenizer.encode(X[:, :1]), r"^images has shape \[5, 1, 12, 20\], expected \[B, 3, H, W\]")
    fails(lambda: tokenizer.encode(X[0]), "^images has shape")
    fails(lambda: tokenizer.encode(X[..., :14]), "^images are 12x14 pixels: .* multiples of 4")
    fails(lambda: tokenizer.encode(X.byte()), "^images is torch.uint8, not floating point")
    fails(lambda: tokenizer.decode(torch.zeros(1, n + 1, 4, 4)), rf"^latents has shape .* expected \[B, {n},")
    fails(lambda: tokenizer.decode(torch.zeros(1, n, 4, 4).long()), "^latents is torch.int64")


def test_wrong_options(kl):
    fails(lambda: SDVAE(kl, scale=0.0), "^scale=0.0 must be above 0")
    fails(lambda: SDVAE(kl, batch_size=0), "^batch_size=0 must be at least 1")
    fails(lambda: SDVAE(kl, dtype=torch.int8), "^dtype=torch.int8 must be one of float32")
    fails(lambda: Identity(0), "^channels=0")
    fails(lambda: build_tokenizer({}), "kind='None' is not known: choose from identity, sd-vae, tiny")
    fails(lambda: build_tokenizer({"kind": "sdvae"}), "did you mean 'sd-vae'")
    fails(
        lambda: build_tokenizer({"kind": "sd-vae", "scales": 1}, kl), "option='scales' .*did you mean 'scale'"
    )
    fails(lambda: build_tokenizer({"kind": "sd-vae", "dtype": "int8"}, kl), "^dtype=int8")
    fails(lambda: build_tokenizer({"kind": "sd-vae", "scale": "x"}, kl), "options .* are wrong")


def test_wrong_folders(kl, tiny, tmp_path):
    fails(lambda: SDVAE(tmp_path / "none"), "neither a folder nor a name on the Hugging Face Hub")
    fails(lambda: SDVAE(kl / "config.json"), "neither a folder nor a name")
    fails(lambda: SDVAE(tmp_path), "holds no autoencoder")
    fails(lambda: SDVAE(tiny), "cannot be read as AutoencoderKL")
    fails(lambda: TinyVAE(kl), "does not match AutoencoderTiny; missing: .*; unknown: ")
    (tmp_path / "config.json").write_text((kl / "config.json").read_text())
    fails(lambda: SDVAE(tmp_path), f"holds no {WEIGHTS}$")
    torch.save(kl_network().state_dict(), tmp_path / "diffusion_pytorch_model.bin")
    fails(lambda: SDVAE(tmp_path), "diffusion_pytorch_model.bin is a pickle, .*convert it to safetensors")
    (tmp_path / WEIGHTS).write_bytes(b"no")
    fails(lambda: SDVAE(tmp_path), "cannot be read as AutoencoderKL")
    state = load_file(kl / WEIGHTS)
    save_file(state | {"more": torch.zeros(1)}, tmp_path / WEIGHTS, metadata={"format": "pt"})
    fails(lambda: SDVAE(tmp_path), "does not match AutoencoderKL; unknown: more$")
    del state["encoder.conv_in.bias"]
    save_file(state, tmp_path / WEIGHTS, metadata={"format": "pt"})
    fails(lambda: SDVAE(tmp_path), "does not match AutoencoderKL; missing: encoder.conv_in.bias$")


@pytest.mark.parametrize("offline", [False, True])
def test_no_network(offline, monkeypatch, tmp_path):
    """An unavailable repository fails fast with one line, with or without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    name = "driftgen-tests/there-is-no-such-repository"
    start = time.perf_counter()
    fails(
        lambda: SDVAE(name),
        f"^{name} (is neither a folder here nor|cannot be downloaded)",
    )
    fails(lambda: TinyVAE(name), f"^{name} ")
    assert time.perf_counter() - start < 10


def test_without_diffusers(monkeypatch, kl, files):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    fails(lambda: SDVAE(kl), r"^SDVAE needs diffusers: pip install 'driftgen\[latent\]'")
    fails(lambda: TinyVAE(kl), r"^TinyVAE needs diffusers: pip install 'driftgen\[latent\]'")
    assert TinyVAE.from_files(*files).encode(X).shape == (5, 6, 3, 5)
