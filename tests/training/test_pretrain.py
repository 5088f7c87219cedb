"""Pretraining: the metrics and previews of a run are those of the weights that it saves."""

import json

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import driftgen as dg
from driftgen.support.distributed import Distributed
from driftgen.training.pretrain import Pretraining, classification_weight, pretrain
from tests.support.fork_server import run_ranks
from tests.support.fsdp_runs import config
from tests.support.runs import Silent

STEPS = ["optim.steps=12", "mae.finetune_steps=6", "mae.finetune_ramp=2", "output.metrics_every=4"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with warm-up and one without; the decay is that of the small recipes."""
    folder = tmp_path_factory.mktemp("runs")
    for warmup in (True, False):
        changes = [*STEPS, "ema=[0.9995]", f"ema_warmup={warmup}"]
        assert pretrain(
            config("pretrain", *changes), folder / str(warmup), Distributed.start("cpu"), Silent()
        )
    return folder


def rows(folder):
    header, *rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return header["header"], rows


@pytest.mark.slow
def test_metrics_are_those_of_the_saved_weights(runs):
    header, (*_, last) = rows(runs / "True")
    assert header.items() >= {"task": "pretrain", "recipe": "", "weights": "EMA 0.9995"}.items()
    task = Pretraining(config("pretrain", *STEPS), Distributed.start("cpu"))
    task.compute_gradient(11)
    measured = task.measure(dg.load_model(runs / "True" / "model").eval())
    for key in ("reconstruction", "classification", "accuracy"):
        assert measured[key] == pytest.approx(last[key], rel=1e-5), key
    assert last["batch_reconstruction"] != last["reconstruction"]
    assert last["batch_accuracy"] is not None
    assert (runs / "True" / "samples" / "step-0000012.png").is_file()
    task.data.close()


@pytest.mark.slow
def test_warmup_saves_what_was_learned(runs):
    _, warm = rows(runs / "True")
    _, cold = rows(runs / "False")
    assert [row["batch_reconstruction"] for row in warm] == [row["batch_reconstruction"] for row in cold]
    assert warm[-1]["reconstruction"] < 0.8 * cold[-1]["reconstruction"]
    assert "ema_initial_share" not in warm[-1]
    share, step = cold[-1]["ema_initial_share"]["0.9995"]
    assert (share, step) == (pytest.approx(0.9995**12), 5990)
    assert "the saved EMA 0.9995 still holds" in cold[0]["warnings"][0]


def test_classification_weight():
    mae = config("pretrain", "mae.finetune_steps=10", "mae.finetune_ramp=4", "mae.finetune_weight=0.2").mae
    weights = [classification_weight(mae, step, 20) for step in (0, 9, 10, 12, 14, 19)]
    assert weights == pytest.approx([0, 0, 0, 0.1, 0.2, 0.2])


def test_a_step_in_micro_batches_is_the_step():
    gradients = []
    for micro in (1, 3):
        task = Pretraining(config("pretrain", *STEPS, f"micro={micro}"), Distributed.start("cpu"))
        task.compute_gradient(8)
        gradients.append(torch.cat([p.grad.flatten() for p in task.mae.parameters() if p.grad is not None]))
        task.data.close()
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()


def pretrain_process(folder):
    """Two steps in micro-batches, before and after fine-tuning begins."""
    distributed = Distributed.start("cpu")
    task = Pretraining(config("pretrain", *STEPS, "micro=2"), distributed)
    reductions = []

    def count(state, bucket):
        reductions.append(len(bucket.parameters()))
        return default_hooks.allreduce_hook(distributed.group, bucket)

    task.model.register_comm_hook(None, count)
    losses = [task.compute_gradient(step).item() for step in (0, 8)]
    assert sum(reductions) == 2 * len(list(task.mae.parameters()))  # every gradient, once a step
    gradient = torch.cat([p.grad.flatten() for p in task.mae.parameters()])
    row = task.measure(task.mae)
    metrics = [row["batch_reconstruction"], row["batch_accuracy"]]
    torch.save((losses, metrics, gradient), f"{folder}/{distributed.rank}.pt")
    task.data.close()
    distributed.close()


@pytest.mark.distributed
def test_two_processes_are_one_batch(tmp_path):
    """Loss, metrics and gradient; the classifier has a gradient of zero before fine-tuning begins."""
    run_ranks(["-c", f"from {__name__} import pretrain_process; pretrain_process({str(tmp_path)!r})"])
    task = Pretraining(config("pretrain", *STEPS), Distributed.start("cpu"))
    losses = []
    for step in (0, 8):
        losses.append(task.compute_gradient(step).item())
        expected = [p.grad for p in task.mae.parameters()]
        assert all(gradient is not None for gradient in expected)
    row = task.measure(task.mae)
    task.data.close()
    for rank in range(2):
        found, metrics, gradient = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found == pytest.approx(losses, rel=1e-5)
        assert metrics == pytest.approx([row["batch_reconstruction"], row["batch_accuracy"]], rel=1e-5)
        whole = torch.cat([g.flatten() for g in expected])
        assert (gradient - whole).norm() < 1e-4 * whole.norm()


def test_accuracy_of_neighbors_on_held_out_digits(tmp_path):
    changes = ["optim.steps=2", "output.eval_every=2", "output.eval_data=digits-heldout", "data.limit=300"]
    view = Silent()
    assert pretrain(config("pretrain", *changes), tmp_path, Distributed.start("cpu"), view)
    (last,) = (row for row in rows(tmp_path)[1] if "knn_accuracy" in row)
    assert last["step"] == 2
    assert 0.5 < last["knn_accuracy"] <= 1  # chance is 0.1
    with pytest.raises(dg.errors.InputError, match=r"set output.eval_data=test.npz"):
        Pretraining(config("pretrain", "output.eval_every=5"), Distributed.start("cpu"))
