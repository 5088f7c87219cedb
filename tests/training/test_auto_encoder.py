"""The choice of an encoder for ``encoders: auto``."""

import json
from pathlib import Path

import pytest
import torch

from driftgen.errors import InputError
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.model_io import save_model
from driftgen.training.auto_encoder import cached_backbones, choose_encoder, is_auto, pretrain_command
from driftgen.training.build import check_encoder_paths
from driftgen.training.recipe_sizes import size_overrides
from driftgen.training.recipes import load_recipe, to_yaml

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def training(tmp_path, *changes):
    return load_recipe("folder", [f"data.path={tmp_path / 'photos'}", *changes], "train")


def encoder_run(folder, data, step, steps=10, *changes, accuracy=None):
    """Write an encoder run that stopped at ``step``."""
    config = load_recipe("mae-folder", [f"data.path={data}", f"optim.steps={steps}", *changes], "pretrain")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    if step:
        facts = {"source": {"step": step}, "class_names": ["a", "b", "c", "d"]}
        save_model(ResNetMAE(3, 32, [1]), folder / "model", **facts)
    if accuracy is not None:
        row = {"step": step, "accuracy": accuracy}
        (folder / "metrics.jsonl").write_text(f'{{"header": {{}}}}\n{json.dumps(row)}\n')


def cached(cache, name, family, weights="model.safetensors"):
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text(json.dumps({"model_type": family}))
    if weights:
        (snapshot / weights).write_bytes(b"")
    return snapshot


@pytest.fixture
def cache(tmp_path):
    pytest.importorskip("transformers")
    place = tmp_path / "hub"
    place.mkdir()
    return place


def test_recipe_says_auto(tmp_path):
    assert is_auto(training(tmp_path))
    assert not is_auto(training(tmp_path, "encoders=[]"))
    assert training(tmp_path, "encoders=[]", "encoders=auto").encoders[0].kind == "auto"


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_a_path_leaves_nothing_to_choose(tmp_path, size):
    config = training(tmp_path, *size_overrides("folder", size), "encoders.0.path=runs/mine")
    assert [(entry.kind, entry.path) for entry in config.encoders] == [("mae", "runs/mine")]
    assert training(tmp_path, "encoders.0.path=runs/mine").encoders[0].kind == "mae"


def test_an_encoder_run_on_the_same_data_comes_first(tmp_path, cache):
    cached(cache, "facebook/dinov2-small", "dinov2")
    run = tmp_path / "runs" / "photos"
    encoder_run(run.with_name("mae-other"), tmp_path / "photos", 10)
    choice = choose_encoder(training(tmp_path), run, GPU, cache)
    assert (choice.how, choice.entry.path) == ("run", str(run.with_name("mae-other")))
    assert "photos" in choice.reason
    encoder_run(run.with_name("mae-photos"), tmp_path / "photos", 10)
    assert choose_encoder(training(tmp_path), run, CPU, cache).entry.path.endswith("mae-photos")


@pytest.mark.parametrize(
    ("steps", "accuracy", "warning"),
    [
        (10000, 0.9, ""),
        (20, 0.9, "the encoder was trained for 20 steps, its recipe has 10,000: "),
        (10000, 0.297, "the encoder has an accuracy of 0.30, near chance (0.25): "),
        (20, 0.297, "20 steps, its recipe has 10,000 and has an accuracy of 0.30, near chance (0.25): "),
        (10000, None, ""),
    ],
)
def test_an_encoder_that_learned_nothing_is_not_taken_silently(tmp_path, cache, steps, accuracy, warning):
    run = tmp_path / "runs" / "photos"
    encoder_run(run.with_name("mae-photos"), tmp_path / "photos", steps, steps, accuracy=accuracy)
    choice = choose_encoder(training(tmp_path), run, CPU, cache)
    assert choice.how == "run"
    shown = f"{steps:,} steps" + ("" if accuracy is None else f", accuracy {accuracy:.2f} (chance 0.25)")
    assert choice.reason.endswith(f"photos before, {shown}")
    assert bool(choice.warning) == bool(warning)
    assert warning in choice.warning
    if warning:
        assert "train it for longer with driftgen pretrain mae-folder --set data.path=" in choice.warning


def test_a_damaged_reference_of_the_cache_is_passed_over(tmp_path, cache):
    snapshot = cached(cache, "facebook/dinov2-small", "dinov2")
    (snapshot.parents[1] / "refs" / "main").write_bytes(b"\xff\n")
    choice = choose_encoder(training(tmp_path), tmp_path / "runs" / "photos", GPU, cache)
    assert (choice.how, choice.entry.path) == ("backbone", str(snapshot))


@pytest.mark.parametrize("change", ["data.size=32", "data.conditional=false", "data.limit=7"])
def test_an_encoder_of_other_data_is_not_used(tmp_path, cache, change):
    run = tmp_path / "runs" / "photos"
    encoder_run(run.with_name("mae-photos"), tmp_path / "photos", 10, 10, change)
    choice = choose_encoder(training(tmp_path), run, CPU, cache)
    assert (choice.how, choice.started) == ("pretrain", False)
    assert choice.entry.path == str(run.with_name("mae-photos-2"))


@pytest.mark.parametrize("step", [0, 4])
def test_an_interrupted_encoder_is_resumed(tmp_path, cache, step):
    run = tmp_path / "runs" / "photos"
    encoder_run(run.with_name("mae-photos"), tmp_path / "photos", step)
    choice = choose_encoder(training(tmp_path), run, CPU, cache)
    assert (choice.how, choice.started) == ("pretrain", True)
    assert choice.entry.path == str(run.with_name("mae-photos"))


def test_a_cached_backbone_is_for_a_gpu(tmp_path, cache):
    snapshot = cached(cache, "facebook/dinov2-small", "dinov2")
    run = tmp_path / "runs" / "photos"
    choice = choose_encoder(training(tmp_path), run, GPU, cache)
    assert (choice.how, choice.entry.kind, choice.entry.path) == ("backbone", "backbone", str(snapshot))
    assert "facebook/dinov2-small" in choice.reason
    choice = choose_encoder(training(tmp_path), run, CPU, cache)
    assert choice.how == "pretrain"
    assert "too slow on a CPU" in choice.reason


def test_cache_lists_supported_and_complete_models(cache):
    cached(cache, "microsoft/resnet-50", "resnet", "pytorch_model.bin")
    cached(cache, "facebook/dinov2-base", "dinov2")
    cached(cache, "facebook/convnextv2-base-22k-224", "convnextv2")
    cached(cache, "openai/clip", "clip")
    cached(cache, "facebook/dinov2-large", "dinov2", None)
    (cache / "models--broken--one" / "snapshots" / "abc").mkdir(parents=True)
    names = [name for name, _ in cached_backbones(cache)]
    assert names == ["facebook/convnextv2-base-22k-224", "facebook/dinov2-base", "microsoft/resnet-50"]


@pytest.mark.parametrize("path", ["runs/mae-folder", "./mae-folder", "here/mae-folder", "{}/mae"])
def test_a_missing_run_is_not_looked_up_on_the_hub(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    config = load_recipe("folder", ["data.path=photos", f"encoders.0.path={path.format(tmp_path)}"])
    with pytest.raises(
        InputError, match=r"^Encoder \S+ not found. Train it first: driftgen pretrain mae-fold"
    ):
        check_encoder_paths(config)


def test_the_message_of_a_missing_run_is_a_command():
    config = load_recipe("folder", ["data.path=photos", "encoders.0.path=runs/mae-folder"])
    with pytest.raises(InputError) as error:
        check_encoder_paths(config)
    assert str(error.value) == (
        "Encoder runs/mae-folder not found. Train it first: "
        "driftgen pretrain mae-folder --set data.path=photos"
    )
    check_encoder_paths(load_recipe("folder", ["encoders.0.path=owner/repository"]))  # may be on the Hub


@pytest.mark.parametrize(
    ("recipe", "pretraining"),
    [("cifar10", "mae-cifar10"), ("mnist", "mae-mnist"), ("imagenet256-latent-ablation", "mae-latent-256")],
)
def test_the_command_names_the_recipe_that_belongs_to_the_run(recipe, pretraining):
    """Also where the folder of the encoder has a name of its own."""
    config = load_recipe(recipe, ["data.path=c.npz", "encoders.0.path=runs/mine"])
    command = f"driftgen pretrain {pretraining} --set data.path=c.npz --out runs/mine"
    with pytest.raises(InputError, match=f"(?m)Train it first: {command}$"):
        check_encoder_paths(config)


def test_command_names_the_folder_and_the_size():
    assert pretrain_command("runs/mae-cifar10", "c.npz") == (
        "driftgen pretrain mae-cifar10 --set data.path=c.npz"
    )
    assert pretrain_command("runs/mae-photos", "my photos", "tiny") == (
        "driftgen pretrain mae-folder --set data.path='my photos' --size tiny --out runs/mae-photos"
    )
