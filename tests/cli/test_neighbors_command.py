"""The command ``driftgen neighbors``."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import driftgen as dg
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.sweep import weights_checksum
from driftgen.generators import DiT, ImageMLP
from driftgen.tokenizers import TinyVAE
from tests.support.autoencoders import taesd_files
from tests.support.image_data import noise


@pytest.fixture
def model(tmp_path):
    """An untrained generator of digits, saved like the model of a run."""
    torch.manual_seed(0)
    net = ImageMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1)
    run = tmp_path / "run"
    dg.DriftPipeline(net, class_names=[str(d) for d in range(10)], guidance=1.5).save_pretrained(
        run / "model"
    )
    (run / "config.yaml").write_text("data: {kind: digits, size: 8, channels: 1}\n")
    return run


def record_of(folder):
    return json.loads((folder / "neighbors.json").read_text())


def colors(path):
    """Number of different colors of a picture: 1 for a blank one."""
    with Image.open(path) as picture:
        return len(picture.convert("RGB").getcolors(2**24))


def test_figure_and_record(model, tmp_path, here):
    out = tmp_path / "out"
    words = ["neighbors", model, "--samples", "30", "--show", "3", "--nearest", "2", "--device", "cpu"]
    done = here(*words, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [str(out / "neighbors.png"), str(out / "neighbors.json")]
    assert "Held-out images are not in the training data." in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines()[:-2])) <= 80
    assert colors(out / "neighbors.png") > 50
    record = record_of(out)
    assert record["weights"] == weights_checksum(dg.DriftPipeline.from_pretrained(model).generator)
    assert record["command"].startswith("driftgen neighbors ")
    settings = ("encoder", "features", "guidance", "seed", "samples", "nearest", "data", "heldout")
    assert [record[key] for key in settings] == ["pixels", 64, 1.5, 0, 30, 2, "digits", "digits-heldout"]
    assert (record["training_images"], record["heldout_images"]) == (1437, 360)
    assert record["heldout_share"] == 0.05
    assert [row["sample"] for row in record["first"]] == [0, 1, 2]
    assert [row["label"] for row in record["first"]] == [0, 1, 2]
    highest = [row["similarities"][0] for row in record["closest"]]
    assert highest == sorted(highest, reverse=True)
    assert highest[0] == record["similarity"]["highest"]
    assert all(len(row["training_indices"]) == 2 for row in record["closest"])

    # The same command gives the same figures; another seed gives others.
    assert here(*words, "--out", tmp_path / "again").returncode == 0
    assert here(*words, "--seed", "1", "--out", tmp_path / "other").returncode == 0
    ignored = ("command", "seconds")
    same, other = (
        {k: v for k, v in record_of(tmp_path / n).items() if k not in ignored} for n in ("again", "other")
    )
    assert same == {k: v for k, v in record.items() if k not in ignored}
    assert other["closest"] != record["closest"]


def test_folder_with_a_damaged_image_and_an_encoder(model, tmp_path, here):
    for name in ("odd", "even"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(15):
            Image.fromarray(noise(9, 8)).save(tmp_path / "images" / name / f"{i:02}.png")
    damaged = tmp_path / "images" / "odd" / "03.png"
    damaged.write_bytes(damaged.read_bytes()[:60])
    torch.manual_seed(0)
    mae = dg.features.ResNetMAE(in_channels=1, base_channels=8, blocks=(1, 1))
    encoder = dg.save_model(mae, tmp_path / "mae")
    out = tmp_path / "out"
    done = here(
        *("neighbors", model, "--data", tmp_path / "images", "--encoder", encoder, "--samples", "12"),
        *("--show", "20", "--out", out, "--device", "cpu"),
    )
    assert done.returncode == 0, done.stderr
    assert "no --heldout was given" in " ".join(done.stdout.split())
    record = record_of(out)
    assert record["leave_one_out"] is True
    assert (record["training_images"], record["heldout_images"]) == (30, 30)
    assert record["encoder"] == "mae"
    assert record["features"] == load_encoder(encoder)(torch.zeros(1, 1, 8, 8, dtype=torch.uint8)).shape[1]
    assert len(record["unreadable_images"]) == 1
    assert str(damaged) in record["unreadable_images"][0]
    assert len(record["first"]) == 12


def test_a_latent_model_is_decoded(tmp_path, here):
    torch.manual_seed(0)
    tokenizer = TinyVAE.from_files(*taesd_files(tmp_path))
    size = 4 * tokenizer.factor
    options = {"hidden_size": 16, "depth": 1, "num_heads": 2, "num_classes": 2, "patch_size": 2}
    net = DiT(input_size=4, in_channels=tokenizer.latent_channels, **options)
    dg.DriftPipeline(net, tokenizer).save_pretrained(tmp_path / "model")
    np.savez(tmp_path / "data.npz", images=noise(40, size, size, 3), labels=["cat", "dog"] * 20)
    out = tmp_path / "out"
    done = here(
        *("neighbors", tmp_path / "model", "--data", tmp_path / "data.npz", "--samples", "4"),
        *("--out", out, "--device", "cpu"),
    )
    assert done.returncode == 0, done.stderr
    assert record_of(out)["image_shape"] == [3, size, size]


def damaged_folder(folder):
    folder.mkdir()
    for i in range(3):
        (folder / f"{i}.png").write_text("no image")
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nowhere"], "data nowhere does not exist: give a folder of images, an .npz or .npy"),
        (["--data", "{tmp}/large.npy"], "generates 8x8 images of 1 channel, {tmp}/large.npy holds 12x12"),
        (["--data", "{tmp}/few.npy"], "data hold 5 image(s): nearest=5 needs at least 6"),
        (["--data", "{tmp}/few.npy", "--nearest", "2"], "data hold 5 image(s): the threshold for near-cop"),
        (["--heldout", "{tmp}/few.npy"], "held-out data hold 5 image(s)"),
        (["--data", "{tmp}/text.npz"], "text.npz cannot be read as an array"),
        (["--data", "{tmp}/damaged"], "3 of 3 images cannot be read"),
        (["--encoder", "{tmp}/mae"], "images of 1x8x8: x is 8x8 pixels: 4 stages"),
        (["--encoder", "{run}"], "is no encoder (ImageMLP)"),
        (["--encoder", "nowhere"], "nowhere does not exist"),
        (["--samples", "0"], "samples=0 and nearest=5 must be at least 1"),
        (["--nearest", "0"], "nearest=0 must be from 1 to 50"),
        (["--show", "1000"], "show=1000 must be from 1 to 200"),
        (["--guidance", "0.5"], "guidance=0.5 must be 1 (none) or more"),
        (["--seed", "-1"], "seed=-1 must be an integer"),
        (["--device", "warp"], "device=warp"),
        (["--out", "{tmp}/few.npy"], "cannot write to"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(words, message, model, tmp_path, here, monkeypatch):
    np.save(tmp_path / "large.npy", noise(30, 12, 12))
    np.save(tmp_path / "few.npy", noise(5, 8, 8))
    (tmp_path / "text.npz").write_text("no array")
    damaged_folder(tmp_path / "damaged")
    dg.save_model(dg.features.ResNetMAE(in_channels=1, base_channels=8, patchify=8), tmp_path / "mae")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    done = here("neighbors", model, *(w.format(tmp=tmp_path, run=model) for w in words))
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message.format(tmp=tmp_path) in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_without_a_run_needs_data(model, tmp_path, here):
    done = here("neighbors", model / "model", "--out", tmp_path / "out")
    assert done.returncode == 2
    assert "does not name its training images: give them with --data" in done.stderr


def test_help_fits_the_terminal(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    done = here("neighbors", "--help")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
