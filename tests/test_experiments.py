"""Records of experiments, and the noise of gradients."""

import json

import pytest
import torch

import driftgen as dg
from tests.support.runs import run
from tools import experiments, gradient_noise
from tools.records import Results


def test_a_record_holds_the_run_and_no_path_of_the_machine(tmp_path):
    run(tmp_path / "run", "optim.steps=3", "seed=5")
    record = experiments.make_record(tmp_path / "run", "more steps", "it runs")
    assert (record["steps"], record["seed"], record["task"]) == (3, 5, "train")
    batch = record["config"]["batch"]
    assert record["samples"] == 3 * batch["classes"] * batch["generated"]
    assert str(tmp_path) not in json.dumps(record)
    out = tmp_path / "record.json"
    assert experiments.main([str(tmp_path / "run"), str(out), "--changed", "a", "--conclusion", "b"]) == 0
    assert json.loads(out.read_text())["conclusion"] == "b"
    assert experiments.main([str(tmp_path), str(out), "--changed", "a", "--conclusion", "b"]) == 2


def test_the_table_has_the_guidance_with_the_least_fid(tmp_path):
    folder = tmp_path / experiments.FOLDER
    folder.mkdir(parents=True)
    rows = [{"guidance": a, "FID": f, "precision": 0.5, "recall": 0.25} for a, f in ((1, 9.0), (1.5, 8.0))]
    record = {
        "task": "train",
        "changed": "width",
        "conclusion": "wider is better",
        "samples": 2_500_000,
        "seconds": 61.4,
        "evaluation": {"rows": rows},
    }
    (folder / "wide.json").write_text(json.dumps(record))
    line = experiments.generators(Results(tmp_path)).splitlines()[-1]
    assert line == "| wide | width | 2.5M | 61 s | 8.00 at 1.5 | 0.500 | 0.250 | wider is better |"


@pytest.fixture
def groups():
    torch.manual_seed(0)
    encoder = dg.features.ResNetMAE(1, 8, blocks=(1, 1)).eval().requires_grad_(False)
    return gradient_noise.Groups(encoder, torch.randn(24, 1, 8, 8), torch.randn(40, 1, 8, 8) + 1, evaluated=4)


def test_gradients_are_those_of_the_loss(groups):
    """The whole group in one call of the loss, with φ of all images in the graph."""
    torch.manual_seed(0)
    encoder = dg.features.ResNetMAE(1, 8, blocks=(1, 1)).eval().requires_grad_(False)
    generated, real = torch.randn(24, 1, 8, 8), torch.randn(40, 1, 8, 8) + 1
    images = generated.clone().requires_grad_()

    def features(x):
        return {
            name: value[None] for name, value in gradient_noise._with_pixels(encoder.features(x), x).items()
        }

    dg.DriftingLoss()(features(images), features(real)).loss.backward()
    assert gradient_noise.cosine(groups.gradient(24, 40), images.grad[:4]) > 0.999


def test_larger_groups_are_less_noisy(groups):
    whole = groups.gradient(24, 40)
    small, large = (
        sum(gradient_noise.cosine(groups.gradient(n, p), whole) for _ in range(8))
        for n, p in ((6, 6), (20, 36))
    )
    assert small < large
    flat = gradient_noise.fine_part(torch.ones(1, 1, 8, 8))
    assert flat.abs().max() == 0
