"""Dry runs: estimates that match the files of a real run, and nothing left behind."""

import copy
import os
import signal
import tempfile
import time

import pytest
import torch

from driftgen.errors import InputError
from driftgen.features import ResNetMAE
from driftgen.generators.image_mlp import ImageMLP
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.support.signals import interruptions
from driftgen.training.build import Parts
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.config import Output
from driftgen.training.dry_run import kept_checkpoints, measure_run
from driftgen.training.pretrain import pretrain
from driftgen.training.recipes import load_recipe
from tests.support.runs import Silent, config, run

SHORT = ["optim.steps=30", "output.samples_every=10", "output.keep_last=1", "ema=[0.9, 0.99]"]


def size(*folders):
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def test_disk_is_that_of_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    estimate = measure_run(config(*SHORT), Distributed.start("cpu"))
    assert not list(tmp_path.iterdir())
    run(tmp_path / "r", *SHORT)
    folder = tmp_path / "r"
    # One more checkpoint is on disk while it is written. JSON files and headers are small here, too.
    assert estimate.checkpoint_bytes == pytest.approx(2 * size(folder / "checkpoints"), rel=0.1)
    models = [folder / name for name in ("model", "model-ema-0.99", "model-live")]
    weights = sum((model / "model.safetensors").stat().st_size for model in models)
    assert estimate.model_bytes == pytest.approx(weights, rel=0.1)
    pictures = size(folder / "samples") + (folder / "metrics.jsonl").stat().st_size
    assert estimate.picture_bytes == pytest.approx(pictures, rel=0.5)
    assert estimate.disk_bytes == (estimate.checkpoint_bytes + estimate.model_bytes + estimate.picture_bytes)
    assert estimate.steps == 30
    assert estimate.memory_bytes > 50 * 2**20
    assert 0 < estimate.seconds_per_step < 10


def test_time_left():
    estimate = measure_run(config(*SHORT), Distributed.start("cpu"))
    first, each = estimate.first_step_seconds, estimate.seconds_per_step
    assert estimate.seconds() == pytest.approx(first + 29 * each)
    assert estimate.seconds(20) == pytest.approx(first + 9 * each)
    assert estimate.seconds(30) == 0


def test_encoders_in_turn_are_each_measured_after_their_first_step(tmp_path):
    entries = []
    for i in range(2):
        save_model(ResNetMAE(in_channels=1, base_channels=40, blocks=[1]), tmp_path / str(i))
        entries.append(f"{{path: {tmp_path / str(i)}}}")
    seen = []

    class Counting(Silent):
        def advance(self, step, seconds_per_step):
            seen.append(step)

    change = [f"encoders=[{', '.join(entries)}]", "encoders_per_step=1", *SHORT]
    estimate = measure_run(config(*change), Distributed.start("cpu"), view=Counting())
    assert seen == [1, 2, 3, 4]
    assert 0 < estimate.seconds_per_step < 10


def test_pretraining_is_measured_too(tmp_path):
    changes = ["batch_size=8", "optim.steps=3", "mae.finetune_steps=0", "data.limit=40"]
    recipe = load_recipe("mae-digits", changes, "pretrain")
    processes = Distributed.start("cpu")
    estimate = measure_run(recipe, processes)
    pretrain(recipe, tmp_path / "r", processes, Silent())
    weights = (tmp_path / "r" / "model" / "model.safetensors").stat().st_size
    assert estimate.model_bytes == pytest.approx(weights, rel=0.05)
    assert estimate.checkpoint_bytes == pytest.approx(size(tmp_path / "r" / "checkpoints"), rel=0.1)


def test_a_measured_network_and_the_random_state_are_as_before():
    recipe = config("optim.steps=30")
    network = ImageMLP(input_size=8, in_channels=1, num_classes=10, hidden_size=16, depth=1)
    network.eval()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    section = recipe.generator.model_copy(update={"kind": "module", "options": {}})
    recipe = recipe.model_copy(update={"generator": section})
    measure_run(recipe, Distributed.start("cpu"), parts=Parts(generator=network), steps=3)
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    assert not network.training
    assert all(p.grad is None for p in network.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_one_step_is_refused():
    with pytest.raises(InputError, match="steps=1 must be at least 2: the first step compiles"):
        measure_run(config(), Distributed.start("cpu"), steps=1)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "steps", "count"),
    [(2, None, 5, 1), (2, None, 20, 2), (2, None, 100, 3), (1, 50, 100, 3), (1, 20, 100, 6)],
)
def test_kept_checkpoints(tmp_path, keep_last, keep_every, steps, count):
    """Counted by writing them."""
    output = Output(checkpoint_every=10, keep_last=keep_last, keep_every=keep_every)
    assert kept_checkpoints(output, steps) == count
    checkpoints, most = Checkpoints(tmp_path, keep_last, keep_every), 0
    for step in [*range(10, steps, 10), steps]:
        most = max(most, len(os.listdir(tmp_path)) + 1 if tmp_path.exists() else 1)
        checkpoints.save(step, {"x": torch.zeros(1)}, {})
    assert most == count


def test_sigterm_removes_what_a_dry_run_wrote(tmp_path, here, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = []

    def update(*_):
        found.extend(tmp_path.glob("driftgen-*"))
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    monkeypatch.setattr("driftgen.training.dry_run._timed", update)
    before = signal.getsignal(signal.SIGTERM)
    # Not the default, which would end the tests.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        done = here("pretrain", "mae-digits", "--out", tmp_path / "run", "--device", "cpu", "--dry-run")
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
        interruptions.clear()
    assert done.returncode == 130
    assert done.stderr.endswith("driftgen: interrupted\n")
    assert found
    assert not list(tmp_path.iterdir())
