"""Every file and folder that the package writes has the mode of the process's umask."""

import os
import stat

import matplotlib.pyplot  # noqa: F401, the import of both takes longer than a test may
import pytest
import torch
import torchmetrics.image.kid  # noqa: F401

import driftgen as dg
from driftgen.generators import DiT, ImageMLP
from driftgen.support.atomic_write import atomic_write, honor_umask
from driftgen.support.sharded_safetensors import write_weights
from driftgen.tokenizers import SDVAE, TinyVAE
from tests.support.artifacts import LATENT, MAE, PIXEL
from tests.support.autoencoders import kl_network, taesd_files
from tests.support.image_data import noise
from tests.support.runs import SMALL, run

CHANGES = [word for change in (*SMALL, "encoders=[]", "optim.steps=2") for word in ("--set", change)]


def with_umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


NAMES = ["umask 022", "umask 027"]
umask = pytest.fixture(params=[0o022, 0o027], ids=NAMES, name="umask")(with_umask)
# For whole commands: the usual umask with all tests, the strict one always.
SLOW = pytest.param(0o022, marks=pytest.mark.slow)
strict_umask = pytest.fixture(params=[SLOW, 0o027], ids=NAMES, name="strict_umask")(with_umask)


@pytest.fixture
def model(tmp_path):
    """An untrained generator of digits."""
    net = ImageMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1)
    return dg.DriftPipeline(net).save_pretrained(tmp_path / "model")


def check_modes(folder, umask, least=1):
    """Assert the mode of everything below a folder, and of the folder."""
    paths = [folder, *folder.rglob("*")]
    assert sum(path.is_file() for path in paths) >= least
    modes = {str(p.relative_to(folder)): oct(stat.S_IMODE(p.stat().st_mode)) for p in paths}
    file, directory = oct(0o666 & ~umask), oct(0o777 & ~umask)
    assert modes == {name: directory if (folder / name).is_dir() else file for name in modes}


def test_a_private_file_gets_the_mode_of_a_new_one(tmp_path, umask):
    path = tmp_path / "out" / "private"
    path.parent.mkdir()
    os.close(os.open(path, os.O_CREAT, 0o600))
    honor_umask(path)
    check_modes(path.parent, umask)
    with atomic_write(path) as scratch:
        os.close(os.open(scratch, os.O_CREAT, 0o600))
    check_modes(path.parent, umask)


def test_a_mode_that_someone_chose_stays(tmp_path):
    path = tmp_path / "script"
    path.touch()
    path.chmod(0o755)
    honor_umask(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o755


@pytest.mark.parametrize("size", ["5GB", 400])
def test_weights_and_their_shards(tmp_path, umask, size):
    folder = tmp_path / "weights"
    folder.mkdir()
    write_weights(folder, {name: torch.zeros(64) for name in "abc"}, size)
    check_modes(folder, umask, least=1 if size == "5GB" else 4)


def test_a_run_with_its_checkpoints_and_its_model(tmp_path, strict_umask, here):
    done = here("train", "digits", *CHANGES, "--device", "cpu", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    check_modes(tmp_path / "run", strict_umask, least=6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(folder, "encoders=[]", "optim.steps=1")
    return folder


@pytest.mark.parametrize("words", [["state"], ["shards", "--max-shard-size", "2KB"]], ids=["state", "shards"])
def test_conversions_of_a_run(trained, words, tmp_path, umask, here):
    done = here("convert", words[0], trained, tmp_path / "out", *words[1:])
    assert done.returncode == 0, done.stderr
    check_modes(tmp_path / "out", umask, least=3)


def test_pretraining(tmp_path, strict_umask, here):
    changes = ["mae.options={base_channels: 40, blocks: [1, 1]}", "mae.finetune_steps=0", "optim.steps=2"]
    words = [word for change in (*changes, "batch_size=8") for word in ("--set", change)]
    done = here("pretrain", "mae-digits", *words, "--device", "cpu", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    check_modes(tmp_path / "run", strict_umask, least=6)


@pytest.mark.parametrize("artifact", [PIXEL, MAE], ids=lambda f: f.name)
def test_conversions_of_the_authors_artifacts(artifact, tmp_path, umask, here):
    assert here("convert", "official", artifact, tmp_path / "ours").returncode == 0
    check_modes(tmp_path / "ours", umask, least=3)
    assert here("convert", "to-official", tmp_path / "ours", tmp_path / "theirs").returncode == 0
    check_modes(tmp_path / "theirs", umask, least=2)


@pytest.mark.parametrize("switch", [[], ["--latents"]], ids=["images", "latents"])
def test_samples(model, tmp_path, umask, here, switch):
    words = (
        LATENT if switch else model,
        "-n",
        "10",
        *switch,
        "--device",
        "cpu",
        "--out",
        tmp_path / "samples",
    )
    done = here("sample", *words)
    assert done.returncode == 0, done.stderr
    check_modes(tmp_path / "samples", umask, least=1 if switch else 12)


def test_statistics_and_evaluations(model, tmp_path, strict_umask, here):
    out = tmp_path / "out"
    out.mkdir()
    common = ["--encoder", "pixels", "--device", "cpu"]
    done = here("eval", "stats", "digits", out / "digits.safetensors", *common)
    assert done.returncode == 0, done.stderr
    words = ["eval", model, "--data", out / "digits.safetensors", "-n", "70", "--out", out / "eval"]
    done = here(*words, *common)
    assert done.returncode == 0, done.stderr
    check_modes(out, strict_umask, least=2)


def test_neighbors(model, tmp_path, strict_umask, here):
    words = ["neighbors", model, "--data", "digits", "--samples", "4", "--show", "1", "--nearest", "1"]
    done = here(*words, "--device", "cpu", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    check_modes(tmp_path / "out", strict_umask, least=2)


def test_toy(tmp_path, strict_umask, here):
    done = here("toy", "bimodal", "--steps", "1", "--samples", "8", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    check_modes(tmp_path / "out", strict_umask, least=3)


@pytest.mark.parametrize("kind", ["SD-VAE", "TAESD"])
def test_a_model_with_its_tokenizer_and_a_latent_cache(kind, tmp_path, umask):
    from driftgen.data.images import open_images
    from driftgen.data.latent_encoding import encode_images
    from driftgen.training.config import Data

    if kind == "SD-VAE":
        kl_network().save_pretrained(tmp_path / "vae")
        tokenizer = SDVAE(tmp_path / "vae")
    else:
        tokenizer = TinyVAE(taesd_files(tmp_path))
    channels = tokenizer.latent_channels
    net = DiT(input_size=8, in_channels=channels, hidden_size=32, depth=1, num_heads=2, num_classes=2)
    out = dg.DriftPipeline(net, tokenizer).save_pretrained(tmp_path / "out" / "model")
    images = open_images(Data(path=str(_images(tmp_path)), size=16))
    encode_images(images, tokenizer, tmp_path / "out" / "cache")
    images.close()
    check_modes(out.parent, umask, least=7)


def _images(folder):
    import numpy as np

    np.savez(folder / "images.npz", images=noise(6, 16, 16, 3), labels=np.arange(6) % 2)
    return folder / "images.npz"
