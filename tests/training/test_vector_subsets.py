"""Random subsets of vectors: unbiased, drawn anew for every step, equal in every part of a step."""

import pytest
import torch

import driftgen as dg
from driftgen.errors import InputError
from driftgen.features import ResNetMAE
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.training.trainer import Training
from driftgen.training.vector_subsets import VectorSubsets
from tests.support.accuracy import error
from tests.support.runs import config, final, run


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def with_encoder(folder, *changes):
    torch.manual_seed(0)
    save_model(ResNetMAE(in_channels=1, base_channels=32, blocks=(1, 1), decoder=False), folder / "mae")
    return [f"encoders=[{{kind: mae, path: {folder / 'mae'}}}]", *changes]


def gradient(task, step=3):
    task.generator.zero_grad()
    task.compute_gradient(step)
    return [p.grad.clone() for p in task.generator.parameters()]


def test_draws():
    subsets = VectorSubsets([1, 64, 16, 16, 4, 256], limit=8)
    assert subsets.sizes == [16, 64, 256]
    drawn = subsets.draw(seeded(0)).split(8)
    for chosen, size in zip(drawn, subsets.sizes, strict=True):
        assert len(set(chosen.tolist())) == 8
        assert chosen.min() >= 0
        assert chosen.max() < size
        assert torch.equal(chosen, chosen.sort().values)
    assert torch.equal(subsets.draw(seeded(0)), torch.cat(drawn))
    assert not torch.equal(subsets.draw(seeded(1)), torch.cat(drawn))


def test_every_vector_is_chosen_equally_often():
    subsets = VectorSubsets([10], limit=3)
    counts = torch.zeros(10)
    randomness = seeded(0)
    for _ in range(2000):
        counts[subsets.draw(randomness)] += 1
    # 600 expected, with a standard deviation of 20.5
    assert ((counts - 600).abs() < 90).all()


def test_features():
    subsets = VectorSubsets([16, 4], limit=4)
    chosen = subsets.draw(seeded(0))
    features = {"map": torch.randn(3, 16, 5), "other": torch.randn(3, 16, 2), "mean": torch.randn(3, 4, 5)}
    kept = subsets(features, chosen)
    assert torch.equal(kept["map"], features["map"][:, chosen])
    assert torch.equal(kept["other"], features["other"][:, chosen])
    assert kept["mean"] is features["mean"]


def test_nothing_to_choose():
    subsets = VectorSubsets([1, 4], limit=4)
    features = {"a": torch.randn(2, 4, 3)}
    assert subsets(features, subsets.draw(seeded(0))) == features


def test_the_gradient_is_that_of_the_chosen_vectors(tmp_path):
    task = Training(config(*with_encoder(tmp_path, "vectors=3")), Distributed.start("cpu"))
    inputs = task.draw(3)
    assert inputs.vectors.shape == (len(inputs.positives), 3 * len(task.subsets.sizes))
    labels, alpha = (t.repeat_interleave(task.config.batch.generated) for t in inputs.conditions)
    rows = inputs.vectors[0].split(3)

    def features(samples):
        chosen = dict(zip(task.subsets.sizes, rows, strict=True))
        return {
            name: (value[:, chosen[value.shape[1]]] if value.shape[1] in chosen else value)
            for name, value in task.phi.features(samples).items()
        }

    def grouped(samples):
        groups = len(inputs.positives)
        return {name: value.unflatten(0, (groups, -1)) for name, value in features(samples).items()}

    generated = grouped(task.generator(inputs.noise, labels, alpha))
    with torch.no_grad():
        positives, unconditional = (
            grouped(t.flatten(0, 1)) for t in (inputs.positives, inputs.unconditional)
        )
    loss = dg.DriftingLoss(**task.config.loss.model_dump())
    weight = inputs.unconditional_weight
    out = loss(generated, positives, unconditional, negative_weight=weight)
    expected = torch.autograd.grad(out.loss, list(task.generator.parameters()))
    for found, wanted in zip(gradient(task), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cached", [False, True])
def test_all_vectors_are_the_whole(tmp_path, cached):
    more = ["data.limit=40", "data.augment={flip: true}", f"cache_features={str(cached).lower()}"]
    whole, all_chosen, some = (
        gradient(Training(config(*with_encoder(tmp_path / str(i), *more, *change)), Distributed.start("cpu")))
        for i, change in enumerate(([], ["vectors=64"], ["vectors=2"]))
    )
    assert all(torch.equal(a, b) for a, b in zip(whole, all_chosen, strict=True))
    assert max(error(a, b) for a, b in zip(some, whole, strict=True)) > 0.01


@pytest.mark.parametrize("mode", ["exact", "previous"])
def test_micro_batches(tmp_path, mode):
    """All parts of a step compare the same vectors."""
    changes = with_encoder(tmp_path, "vectors=3", "precision=float32")
    whole, parts = (
        gradient(Training(config(*changes, *micro), Distributed.start("cpu")))
        for micro in ([], ["batch.micro=2", f"batch.mode={mode}"])
    )
    for a, b in zip(whole, parts, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=1e-5)


def test_a_run_measures_and_resumes(tmp_path):
    changes = with_encoder(tmp_path, "vectors=3", "output.metrics_every=2")
    done, view = run(tmp_path / "whole", *changes, "optim.steps=4")
    assert done
    assert 0 < view.rows[-1]["spread"] < 10
    run(tmp_path / "parts", *changes, "optim.steps=2")
    run(tmp_path / "parts", *changes, "optim.steps=4", override=True)
    whole, parts = final(tmp_path / "whole"), final(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_averaged_weights_are_measured_on_the_same_vectors(tmp_path):
    """The trained weights in place of an average: both have the same spread."""
    task = Training(config(*with_encoder(tmp_path, "vectors=1")), Distributed.start("cpu"))
    task.compute_gradient(3)
    row = task.measure(task.generator)
    assert row["spread"] == pytest.approx(row["batch_spread"], rel=1e-4)
    assert row["diversity"] == pytest.approx(row["batch_diversity"], rel=1e-4)


def test_the_papers_loss_sums_over_all_vectors():
    with pytest.raises(InputError, match=r"vectors needs loss\.convention=release"):
        config("vectors=4", "loss.convention=paper")


@pytest.mark.cuda
def test_a_captured_step_reads_the_chosen_vectors(tmp_path):
    changes = with_encoder(tmp_path, "vectors=3")
    for step in (3, 4):
        captured, plain = (
            gradient(Training(config(*changes, *graph), Distributed.start("cuda")), step)
            for graph in ([], ["cuda_graph=false"])
        )
        assert all(error(a, b) < 1e-3 for a, b in zip(captured, plain, strict=True))
