"""Every command picks its device alike: the one of ``--device``, else the best available."""

import click
import pytest
import torch
import typer

import driftgen as dg
from driftgen.cli import app
from driftgen.support.distributed import Distributed, choose_device
from tests.support.artifacts import PIXEL
from tests.support.helpers import fails

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a torch without a GPU")


def commands(command, name=""):
    if isinstance(command, click.Group) or hasattr(command, "commands"):
        for inner, child in command.commands.items():
            yield from commands(child, f"{name} {inner}".strip())
    else:
        yield name, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_the_option_is_the_same_everywhere():
    options = {
        name: parameter
        for name, command in COMMANDS.items()
        for parameter in command.params
        if "--device" in parameter.opts
    }
    assert {"sample", "train", "pretrain", "encode", "eval", "neighbors", "ablate"} <= options.keys()
    for name, option in options.items():
        assert option.default is None, name
        assert option.help == options["train"].help, name


@pytest.mark.parametrize(("available", "expected"), [(True, "cuda"), (False, "cpu")])
def test_the_best_device_available(available, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert choose_device(None) == Distributed.start(None).device == torch.device(expected)
    assert choose_device("cpu") == Distributed.start("cpu").device == torch.device("cpu")


@pytest.mark.parametrize("choose", [choose_device, lambda name: pipeline().to(name)], ids=["choose", "to"])
def test_a_device_that_is_not_there(choose):
    fails(lambda: choose("gpu"), "device=gpu is not a device: choose from cpu, cuda, mps, xpu")
    if not torch.cuda.is_available():
        fails(lambda: choose("cuda"), "device=cuda: torch finds no NVIDIA GPU here")


def test_names_of_no_device():
    fails(lambda: choose_device(""), "device='' is not a device: choose from cpu, cuda, mps, xpu")
    fails(lambda: choose_device("cpu:7"), "device=cpu:7: the CPU is one device, give cpu")
    assert choose_device("cpu:0").type == "cpu"


def pipeline():
    return dg.DriftPipeline(dg.generators.ImageMLP(input_size=8, in_channels=1, num_classes=10))


@no_gpu
def test_sample_without_the_option_uses_a_gpu_if_there_is_one(tmp_path, here, monkeypatch):
    words = ["sample", PIXEL, "--labels", "3", "--out", tmp_path / "out"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    done = here(*words)
    assert done.returncode == 2
    assert "device=cuda: " in done.stderr  # it tries to, and this torch has no CUDA
    monkeypatch.undo()
    assert here(*words).returncode == 0


@no_gpu
def test_sample_names_a_missing_gpu_as_train_does(tmp_path, here):
    errors = [
        here(*words, "--device", "cuda", "--out", tmp_path / "out").stderr
        for words in (["sample", PIXEL], ["train", "digits"])
    ]
    assert errors[0] == errors[1]
    assert "torch finds no NVIDIA GPU here" in errors[0]
