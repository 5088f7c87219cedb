"""The commands ``driftgen sample`` and ``driftgen convert``."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from driftgen.cli.options import folder_of_model
from driftgen.generators import ImageMLP
from driftgen.model_io import save_model
from driftgen.pipeline import DriftPipeline
from driftgen.support.sheets import read_sheet
from tests.support.artifacts import ARTIFACTS, LATENT, MAE, PIXEL
from tests.support.fork_server import CAPTURE, start_driftgen
from tests.support.fork_server import run_driftgen as run
from tests.support.libraries import import_library
from tests.support.small_policy import save_small_policy


def pictures(folder):
    return sorted(p.name for p in folder.glob("0*.png"))


def test_sample_writes_single_images_and_a_sheet(tmp_path, here):
    out = tmp_path / "s"
    words = ["sample", PIXEL, "--labels", "3,5", "--guidance", "1.5", "--seed", "0", "--out", out]
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out / "grid.png")
    assert pictures(out) == ["00000_class3.png", "00001_class5.png"]
    assert "1 network call per image" in done.stderr
    record = json.loads((out / "samples.json").read_text())
    assert (record["labels"], record["guidance"], record["seed"]) == ([3, 5], 1.5, 0)
    first = (out / "00001_class5.png").read_bytes()

    # The same command completes missing images identically; other settings need another folder.
    (out / "00001_class5.png").unlink()
    assert here(*words).returncode == 0
    assert (out / "00001_class5.png").read_bytes() == first
    words[words.index("0")] = "1"
    other = here(*words)
    assert other.returncode == 2
    assert "holds other samples (another seed): choose another folder" in other.stderr
    assert (out / "00001_class5.png").read_bytes() == first


def test_samples_of_two_models_do_not_meet(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(ImageMLP(input_size=8, in_channels=1, hidden_size=16), tmp_path / "mine")
    for model in ("digits", "mine/"):
        done = here("sample", model, "-n", "1", "--device", "cpu")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(Path("runs/samples") / model.strip("/") / "grid.png")
    monkeypatch.chdir(tmp_path / "mine")
    assert folder_of_model("samples", ".") == Path("runs/samples/mine")
    assert folder_of_model("samples", "hf://latent_L") == Path("runs/samples/latent_L")
    assert folder_of_model("samples", "/") == Path("runs/samples/model")


def test_names_of_classes_are_in_file_names_and_on_the_sheet(tmp_path, here):
    names = ["cat", "dog/../..", "1", "Ærø & <x>: 'y'", "...", "5", "a" * 300, "b", "c", "d"]
    model = tmp_path / "model"
    pipe = DriftPipeline(ImageMLP(input_size=4, num_classes=10, hidden_size=8, depth=1), class_names=names)
    pipe.save_pretrained(model)
    out = tmp_path / "s"
    words = ["sample", model, "--labels", "0-6", "--seed", "0", "--out", out]
    assert here(*words).returncode == 0
    expected = [
        "00000_class0_cat.png",
        "00001_class1_dog.png",
        "00002_class2_1.png",
        "00003_class3_Ærø-x-y.png",
        "00004_class4.png",
        "00005_class5.png",
        f"00006_class6_{'a' * 40}.png",
    ]
    assert pictures(out) == expected
    assert list(read_sheet(out / "grid.png").captions) == names[:7]
    # A folder of an earlier version, without names, is completed as it is.
    shutil.move(out / expected[0], out / "00000_class0.png")
    (out / expected[3]).unlink()
    assert here(*words).returncode == 0
    assert pictures(out) == ["00000_class0.png", *expected[1:]]


def test_ranges_and_numbers(tmp_path, here):
    assert here("sample", PIXEL, "--labels", "0-2", "-n", "7", "--out", tmp_path).returncode == 0
    assert [name[-5] for name in pictures(tmp_path)] == list("0120120")
    sheet = Image.open(tmp_path / "grid.png")
    assert sheet.size == (3 * 66 + 2, 3 * 66 + 2)


def test_latents_of_an_artifact_without_its_tokenizer(tmp_path, here):
    done = here("sample", LATENT, "--labels", "1", "--latents", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    stored = load_file(tmp_path / "latents.safetensors")
    assert stored["latents"].shape == (1, 4, 8, 8)
    assert stored["labels"].tolist() == [1]


@pytest.mark.parametrize("words", [("sample", PIXEL, "--out"), ("export", PIXEL)], ids=lambda w: w[0])
def test_pixels_have_no_latents(words, tmp_path, here):
    done = here(*words, tmp_path / "a.pt2", "--latents")
    assert done.returncode == 2
    assert f"{PIXEL} generates pixels and has no latents: leave out --latents" in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_policy_has_no_latents(tmp_path, here):
    done = here("export", save_small_policy(tmp_path / "policy"), tmp_path / "a.pt2", "--latents")
    assert done.returncode == 2
    assert "is a policy and has no latents: leave out --latents" in done.stderr


@pytest.mark.parametrize("folder", [PIXEL, LATENT, MAE, ARTIFACTS / "convnext_tiny"], ids=lambda f: f.name)
def test_convert_there_and_back(folder, tmp_path, here):
    if folder.name == "convnext_tiny":
        import_library("transformers", "ConvNextV2Model")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    done = here("convert", "official", folder, ours)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(ours)
    assert {p.name for p in ours.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    assert here("convert", "to-official", ours, theirs).returncode == 0
    source = folder / "params_ema" if (folder / "params_ema").is_dir() else folder
    for path in source.iterdir():
        assert (theirs / path.name).read_bytes() == path.read_bytes()


def test_a_converted_model_samples_the_same(tmp_path, here):
    assert here("convert", "official", PIXEL, tmp_path / "m").returncode == 0
    for name, model in (("a", PIXEL), ("b", tmp_path / "m")):
        assert here("sample", model, "--labels", "2", "--out", tmp_path / name).returncode == 0
    a, b = (np.asarray(Image.open(tmp_path / n / "00000_class2.png")) for n in "ab")
    assert np.array_equal(a, b)


def damaged(tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(LATENT / "params_ema", folder)
    path = folder / "ema_params.msgpack"
    path.write_bytes(path.read_bytes()[:-100])
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sample", "{pixel}", "--labels", "10"],
            "labels: 10 is not a class of this model, classes are 0 to 9",
        ),
        (["sample", "{pixel}", "--labels", "cat"], "the model has no class names"),
        (
            ["sample", "{pixel}", "--labels", ""],
            "the model has no class names, give an index instead of ''",
        ),
        (["sample", "{pixel}", "--guidance", "0.5"], "guidance=0.5 must be 1 (none) or more"),
        (["sample", "{pixel}", "--dtype", "int8"], "dtype='int8' is not known"),
        (["sample", "{pixel}", "--device", "warp"], "device=warp"),
        (["sample", "{pixel}", "--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["sample", "{pixel}", "-n", "0"], "--number=0 must be from 1 to"),
        (["sample", "nowhere"], "nowhere does not exist: give a folder"),
        (["sample", "{tmp}"], "holds no model: config.json and model.safetensors"),
        (["sample", "{damaged}"], "ends too early: it is truncated; copy it again"),
        (["sample", "digits", "--labels", "3,5", "-n", "1"], "--number=1 is less than the 2 labels"),
        (["sample", "{mae}"], "is an encoder (ResNetMAE), not a generator"),
        (["convert", "official", "{damaged}", "{tmp}/new"], "ends too early: it is truncated"),
        (["convert", "official", "{tmp}", "{tmp}/new"], "holds no released model"),
        (["convert", "to-official", "{tmp}", "{tmp}/new"], "holds no model"),
        (["convert", "official", "{pixel}", "{damaged}"], "exists and is not an empty folder"),
        (["convert", "sideways"], "No such command 'sideways'"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(words, message, tmp_path, here, monkeypatch):
    places = {"pixel": PIXEL, "mae": MAE, "tmp": tmp_path, "damaged": damaged(tmp_path)}
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    done = here(*(w.format(**places) for w in words))
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert message in done.stderr
    assert done.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_interrupted_sampling_resumes(tmp_path):
    out = tmp_path / "s"
    words = ["sample", PIXEL, "-n", "800", "--batch-size", "1", "--out", out]
    process = start_driftgen(*words, stderr=CAPTURE)
    while not pictures(out)[20:]:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    written = {name: (out / name).read_bytes() for name in pictures(out)}
    assert not list(out.glob("*partial*"))
    assert len(written) < 800
    words[words.index("1")] = "64"
    assert run(*words).returncode == 0
    assert len(pictures(out)) == 800
    assert all((out / name).read_bytes() == content for name, content in written.items())


def test_help_fits_the_terminal(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for words in (["sample"], ["convert"], ["convert", "official"], ["train"], ["pretrain"], ["encode"]):
        done = here(*words, "--help")
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80
