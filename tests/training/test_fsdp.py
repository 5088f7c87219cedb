"""FSDP with real processes: what two hold in shares trains as one that holds everything."""

import json
import shutil

import pytest
import torch

import driftgen as dg
from driftgen.features.resnet_mae import ResNetMAE
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.training.pretrain import pretrain
from driftgen.training.trainer import train
from tests.support.fork_server import run_ranks
from tests.support.fsdp_runs import config
from tests.support.runs import Silent, final

pytestmark = pytest.mark.distributed

# Runs one task after the other in this process of several, and writes down which share of each it holds.
PROGRAM = """
import json, sys
from pathlib import Path
from tests.support.fsdp_runs import config
from tests.support.runs import Silent
from driftgen.training import loop, pretrain, trainer
from driftgen.support.distributed import Distributed

def held(tensors):
    tensors = list(tensors)
    return sum(t.to_local().numel() for t in tensors) / sum(t.numel() for t in tensors)

def run_and_look(self):
    done = run(self)
    parts = {"model": self.task.model, **self.ema.models}
    if self.config.task == "train":
        parts |= {f"encoder {i}": e for i, e in enumerate(self.task.phi.encoders)}
    shares = {name: held(part.state_dict().values()) for name, part in parts.items()}
    shares["optimizer"] = held(s["exp_avg"] for s in self.update.optimizer.state.values())
    self.folder.with_name(f"{self.folder.name}.{self.distributed.rank}.json").write_text(json.dumps(shares))
    return done

run, loop.Loop.run = loop.Loop.run, run_and_look
distributed = Distributed.start("cpu")
for folder, task, *changes in json.loads(sys.argv[1]):
    start = trainer.train if task == "train" else pretrain.pretrain
    start(config(task, "fsdp=true", *changes), Path(folder), distributed, Silent(), override=True)
distributed.close()
"""


def alone(task, folder, *changes):
    view = Silent()
    start = train if task == "train" else pretrain
    assert start(config(task, *changes), folder, Distributed.start("cpu"), view, override=True)
    return view


def shared(*jobs):
    """Two processes do the jobs: folder, task, changes."""
    run_ranks(["-c", PROGRAM, json.dumps([[str(folder), *rest] for folder, *rest in jobs])])


def shares(folder):
    """Of each thing, what each process holds."""
    first, second = (json.loads(folder.with_name(f"{folder.name}.{i}.json").read_text()) for i in (0, 1))
    assert first.keys() == second.keys()
    return {name: (first[name], second[name]) for name in first}


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[1:]]
    return torch.tensor([[row["loss"], row["gradient_norm"]] for row in found], dtype=torch.float64)


def assert_same(found, expected, limit):
    """Tensor by tensor, as Adam makes much of rounding where an entry's gradient is next to nothing."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape
        error, size = (x.double().norm() for x in (found[name] - value, value))
        assert error <= limit * size + 1e-9, (name, float(error), float(size))


@pytest.mark.slow
def test_two_that_share_train_as_one(tmp_path):
    torch.manual_seed(0)
    save_model(ResNetMAE(in_channels=1, base_channels=64, blocks=(1, 1), decoder=False), tmp_path / "mae")
    encoder = f"encoders=[{{path: {tmp_path / 'mae'}}}]"
    # With an encoder, rounding may push a ReLU over its edge, which changes gradients by up to a hundredth:
    # few steps, in which that is rare, and a limit that allows for it.
    cases = [("encoder", [encoder], 13, 3e-2), ("smooth", [], 20, 1e-4)]
    for name, changes, steps, _ in cases:
        one, two = tmp_path / name, tmp_path / f"{name}-shared"
        # A DiT begins with samples that are all the same, where rounding decides: compare a little later.
        alone("train", one, *changes, "optim.steps=10")
        shutil.copytree(one, two)
        alone("train", one, *changes, f"optim.steps={steps}")
    shared(
        (tmp_path / "encoder-shared", "train", encoder, "optim.steps=13"),
        (tmp_path / "smooth-shared", "train", "optim.steps=15", "batch.micro=2"),
        (tmp_path / "smooth-shared", "train", "optim.steps=20"),
    )
    for name, _, steps, limit in cases:
        one, two = tmp_path / name, tmp_path / f"{name}-shared"
        assert rows(one).shape == rows(two).shape == (steps, 2)
        loss, norm = ((rows(one) - rows(two)).abs() / rows(one)).amax(0)
        assert loss < 1e-4
        assert norm < limit
        assert_same(final(two), final(one), limit)
        for model in ("model", "model-ema-0.5"):
            found, expected = (dg.load_model(run / model).state_dict() for run in (two, one))
            assert_same(found, expected, limit)

    # Weights, averages, encoder and optimizer are really sharded.
    found = shares(tmp_path / "encoder-shared")
    assert found.keys() == {"model", "0.9", "0.5", "encoder 0", "optimizer"}
    for first, second in found.values():
        assert 0.4 < second <= first < 0.6
        assert first + second == pytest.approx(1)

    # What they leave behind is that of any run, and one alone goes on with it.
    assert (two / "samples" / "step-0000020.png").is_file()
    alone("train", one, "optim.steps=22")
    view = alone("train", two, "optim.steps=22", "fsdp=true")
    assert "one process, which holds everything" in view.said[0]
    assert view.said[1] == "resumed after step 20"
    assert_same(final(two), final(one), 1e-4)


@pytest.mark.slow
def test_two_that_share_pretrain_as_one(tmp_path):
    changes = ["optim.steps=6", "mae.finetune_steps=3", "mae.finetune_ramp=2", "output.metrics_every=3"]
    one, two = tmp_path / "one", tmp_path / "two"
    alone("pretrain", one, *changes)
    shared((two, "pretrain", *changes))
    assert_same(final(two), final(one), 3e-2)
    assert all(0.4 < share < 0.6 for pair in shares(two).values() for share in pair)
    assert (two / "samples" / "step-0000006.png").is_file()
    found, expected = (dg.load_model(run / "model").state_dict() for run in (two, one))
    assert_same(found, expected, 3e-2)
