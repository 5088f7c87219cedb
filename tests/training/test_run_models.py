"""Models of a run: saved at every checkpoint, each set of weights by its name."""

import json
import shutil

import pytest
import torch

import driftgen as dg
from driftgen.interop.run_models import model_folders, weight_sets
from driftgen.model_io import find_model
from driftgen.support.distributed import Distributed
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.pretrain import pretrain
from driftgen.training.recipes import load_recipe
from driftgen.training.trainer import Training, train
from tests.support.runs import Silent, config, run

CHANGES = ["optim.steps=25", "output.checkpoint_every=10", "ema=[0.9, 0.99]"]


def test_folders_of_the_sets_of_weights():
    assert list(model_folders(["0.9", "0.99", "live"])) == [
        ("0.9", "model", {"ema": "0.9"}),
        ("0.99", "model-ema-0.99", {"ema": "0.99"}),
        ("live", "model-live", {"weights": "live"}),
    ]


class StoppedError(Exception):
    """Stands for a kill."""


class KilledView(Silent):
    """Ends the process's work after a step, without the signal that saves."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def advance(self, step, seconds_per_step):
        if step == self.step:
            raise StoppedError


def killed_run(folder, step, *changes):
    with pytest.raises(StoppedError):
        train(config(*CHANGES, *changes), folder, Distributed.start("cpu"), KilledView(step), name="digits")


def saved_step(model):
    return json.loads((model / "config.json").read_text())["source"]["step"]


def refused(function, *arguments, **options):
    with pytest.raises(dg.InputError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_killed_run_has_the_model_of_its_last_checkpoint(tmp_path):
    folder = tmp_path / "r"
    killed_run(folder, 9)
    message = refused(dg.DriftPipeline.from_pretrained, folder)
    assert message == (
        f"{folder} has no model yet: it saves one at its next checkpoint, at step 10, and is at step 5 now; "
        "wait for it, resume the run if it has stopped, or press Ctrl-C in it, which saves one"
    )
    killed_run(folder, 22)
    assert Checkpoints(folder / "checkpoints").steps == [10, 20]
    assert saved_step(folder / "model") == 20
    tensors = Checkpoints(folder / "checkpoints").load().tensors
    for name, prefix in {"ema-0.9": "ema/0.9", "ema-0.99": "ema/0.99", "live": "model"}.items():
        network = dg.DriftPipeline.from_pretrained(folder, weights=name).generator
        for key, value in network.state_dict().items():
            assert torch.equal(value, tensors[f"{prefix}/{key}"]), (name, key)
    default = dg.DriftPipeline.from_pretrained(folder)
    assert default.source["ema"] == "0.9"
    assert default.source["guidance_range"] == [1.0, 3.0]
    assert torch.equal(
        default(3, seed=0, output="tensor"),
        dg.DriftPipeline.from_pretrained(folder, weights="ema-0.9")(3, seed=0, output="tensor"),
    )
    # Resumed, it ends as an uninterrupted run does: saving changes nothing.
    run(folder, *CHANGES)
    run(tmp_path / "straight", *CHANGES, "output.checkpoint_every=1000")
    ended, straight = (Checkpoints(f / "checkpoints").load().tensors for f in (folder, tmp_path / "straight"))
    assert all(torch.equal(ended[key], value) for key, value in straight.items())
    assert saved_step(folder / "model") == 25


def test_names_of_weights(tmp_path):
    folder = tmp_path / "r"
    run(folder, *CHANGES, "optim.steps=10")
    assert weight_sets(folder) == {
        "ema-0.9": folder / "model",
        "ema-0.99": folder / "model-ema-0.99",
        "live": folder / "model-live",
    }
    message = refused(find_model, str(folder), "ema-0.5")
    assert message == f"weights='ema-0.5': {folder} has ema-0.9, ema-0.99, live; choose one of them"
    model = folder / "model"
    assert find_model(str(model), "ema-0.9") == model
    message = refused(find_model, str(model), "live")
    assert message == (
        f"weights='live': {model} is a saved model with one set of weights, ema-0.9; give the folder of a "
        "run to choose another"
    )
    # A kill between two renames leaves the old model under another name: it is found, and then restored.
    model.replace(folder / "model.replaced")
    (folder / "model-live").replace(folder / "model-live.partial")
    assert find_model(str(folder)) == folder / "model.replaced"
    assert list(weight_sets(folder)) == ["ema-0.9", "ema-0.99"]
    run(folder, *CHANGES, "optim.steps=10")
    assert find_model(str(folder)) == model
    assert not (folder / "model.replaced").exists()
    # A plain model that is not from a run.
    shutil.copytree(model, tmp_path / "plain")
    record = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**record, "source": {}}))
    assert "with one set of weights, saved;" in refused(find_model, str(tmp_path / "plain"), "live")


def test_the_trained_network_keeps_its_mode(tmp_path):
    task = Training(config(*CHANGES), Distributed.start("cpu"))
    task.generator.train()
    inner = next(task.generator.children())
    inner.eval()
    task.save_models({"0.9": task.generator, "live": task.generator}, tmp_path, 0)
    assert task.generator.training
    assert not inner.training


def test_sampling_by_name_from_the_command(tmp_path, here, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(tmp_path / "r", *CHANGES, "optim.steps=10")
    done = here("sample", "r", "-n", "10", "--weights", "live", "--out", "live", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "live" / "samples.json").read_text())
    assert record["weights"] == "live"
    assert record["step"] == 10
    done = here("sample", "r", "-n", "10", "--weights", "best", "--out", "best")
    assert done.returncode == 2
    assert "weights='best': r has ema-0.9, ema-0.99, live; choose one of them" in done.stderr
    # The run goes on: its images are others, which must not be taken for those of before.
    run(tmp_path / "r", *CHANGES, "optim.steps=12", override=True)
    done = here("sample", "r", "-n", "10", "--weights", "live", "--out", "live")
    assert done.returncode == 2
    assert "live holds other samples (another step): choose another folder" in done.stderr


def test_a_pretrained_encoder_is_saved_at_checkpoints(tmp_path):
    changes = ["batch_size=8", "optim.steps=4", "mae.finetune_steps=0", "data.limit=40"]
    recipe = load_recipe("mae-digits", [*changes, "output.checkpoint_every=2"], "pretrain")
    with pytest.raises(StoppedError):
        pretrain(recipe, tmp_path / "r", Distributed.start("cpu"), KilledView(3))
    assert saved_step(tmp_path / "r" / "model") == 2
    assert type(dg.load_model(tmp_path / "r")).__name__ == "ResNetMAE"


def test_a_damaged_interval_of_checkpoints_gives_the_general_message(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "config.yaml").write_text("output: {checkpoint_every: 0}\noptim: {steps: 5}\n")
    with pytest.raises(dg.InputError, match="has no model yet: a run saves one at every checkpoint"):
        dg.load_model(tmp_path)
