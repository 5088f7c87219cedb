"""Commands that resume in a folder: the second one is told who holds it, and links in it lead nowhere."""

import shutil

import pytest

import driftgen as dg
from driftgen.generators import ImageMLP
from driftgen.report.run_page import write_report
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


def test_a_run_writes_nothing_through_links_in_its_folder(tmp_path):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    run(folder, "encoders=[]", "optim.steps=1", report=write_report)
    (outside / "model").mkdir(parents=True)
    names = ["model", "model-live", "report.html", "report.partial.html", "config.yaml", "model.replaced"]
    for name in names:
        place = folder / name
        if name == "config.yaml":
            shutil.copy(place, outside / name)
        elif not (outside / name).exists():
            (outside / name).write_text("of somebody else")
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(outside / name)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    run(folder, "encoders=[]", "optim.steps=2", report=write_report, override=True)
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    assert not any((outside / "model").iterdir())
    assert not [name for name in names if name != "report.partial.html" and (folder / name).is_symlink()]
