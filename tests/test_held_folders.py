"""Commands that resume in a folder: the second one in the same folder is told who holds it."""

import pytest

import driftgen as dg
from driftgen.generators import ImageMLP
from driftgen.support.folder_lock import hold_file, hold_folder
from tests.support.held_folders import in_another_process
from tests.support.runs import SMALL, run

CHANGES = [word for change in (*SMALL, "encoders=[]", "optim.steps=2") for word in ("--set", change)]
holder = pytest.fixture(in_another_process, name="holder")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    net = ImageMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1)
    return dg.DriftPipeline(net).save_pretrained(tmp_path_factory.mktemp("model") / "model")


@pytest.mark.parametrize("command", ["train", "pretrain", "sample", "eval", "stats", "ablate"])
def test_the_second_command_names_the_first(command, model, tmp_path, holder, here):
    out = tmp_path / "out"
    words = {
        "train": ["train", "digits", *CHANGES, "--device", "cpu", "--out", out],
        "pretrain": ["pretrain", "mae-digits", "--device", "cpu", "--out", out],
        "sample": ["sample", model, "-n", "10", "--device", "cpu", "--out", out],
        "eval": ["eval", model, "--data", "digits", "--encoder", "pixels", "--device", "cpu", "--out", out],
        "stats": ["eval", "stats", "digits", out.with_suffix(".safetensors"), "--encoder", "pixels"],
        "ablate": ["ablate", "temperatures", "--base", "digits", "--device", "cpu", "--out", out],
    }[command]
    start, _ = holder
    pid = start(hold_file(out.with_suffix(".safetensors")) if command == "stats" else hold_folder(out))
    done = here(*words)
    assert done.returncode == 2
    assert f"in use by process {pid} on " in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.suffix != ".lock" and path != out]


def test_a_killed_holder_does_not_stop_the_next_run(tmp_path, holder):
    start, kill = holder
    kill(start(hold_folder(tmp_path)))
    done, _ = run(tmp_path, "encoders=[]", "optim.steps=1")
    assert done
    assert not list(tmp_path.glob("*.lock"))
