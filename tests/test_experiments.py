"""Records of experiments, and the noise of gradients."""

import json

import pytest
import torch

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


def test_runs_without_an_evaluation_are_listed_apart(tmp_path):
    folder = tmp_path / experiments.FOLDER
    folder.mkdir(parents=True)
    curve = [{"step": 1000, "samples": 10_000, "ema": {"0.999": {"FID": 58.15}, "0.9998": {"FID": 70.0}}}]
    record = {
        "task": "train",
        "changed": "cooler",
        "conclusion": "slower",
        "steps": 2000,
        "samples": 1_280_000,
        "samples_per_second": 15500.4,
        "curve": curve,
    }
    (folder / "cool.json").write_text(json.dumps(record))
    results = Results(tmp_path)
    line = experiments.comparisons(results).splitlines()[-1]
    assert line == "| cool | cooler | 58.1 at 0.6M | 10,000 | 15,500 | slower |"
    assert "cool" not in experiments.generators(results)


def noisy(mean, noise, count, seed):
    random = torch.Generator().manual_seed(seed)
    return (mean + noise * torch.randn(len(mean), generator=random) for _ in range(count))


def test_the_statistics_of_known_gradients():
    """For g = m + σ·n in d dimensions, cos(g, μ) = cos(m, μ) / √(1 + dσ²/‖m‖²)."""
    d, generator = 4000, torch.Generator().manual_seed(1)
    truth, other = (torch.randn(d, generator=generator) for _ in range(2))
    truth, other = truth / truth.norm(), other - (other @ truth) / (truth @ truth) * truth
    mean = 2 * (0.8 * truth + 0.6 * other / other.norm())
    reference = gradient_noise.Reference.measure(noisy(truth, 0.1 / d**0.5, 40, 2))
    found = gradient_noise.compare(noisy(mean, 4 / d**0.5, 40, 3), reference)
    assert reference.agreement[0] == pytest.approx(1, abs=1e-3)
    assert found["signal_to_noise"] == pytest.approx(2**2 / 4**2, rel=0.05)
    assert found["bias"] == pytest.approx(0.8, abs=0.02)
    assert found["cosine"] == pytest.approx(0.8 / (1 + 4) ** 0.5, abs=0.02)


def test_a_noisy_reference_is_corrected_for():
    d, generator = 4000, torch.Generator().manual_seed(1)
    truth = torch.randn(d, generator=generator)
    truth = truth / truth.norm()
    sharp, blunt = (
        gradient_noise.Reference.measure(noisy(truth, noise / d**0.5, 40, 2)) for noise in (0.1, 4.0)
    )
    assert blunt.agreement[0] < 0.9
    a, b = (gradient_noise.compare(noisy(truth, 2 / d**0.5, 40, 3), r)["cosine"] for r in (sharp, blunt))
    assert b == pytest.approx(a, abs=0.05)


def test_gradients_are_those_of_training(tmp_path):
    """Larger steps are less noisy, and the record names its sizes but no folder."""
    run(tmp_path / "run", "optim.steps=3")
    out, said = tmp_path / "noise.json", []
    small = ["generator.options={hidden_size: 32, depth: 1, style_codebooks: 2}", "encoders=[]"]
    sets = [word for change in small for word in ("--set", change)]
    words = ["digits", str(tmp_path / "run"), *sets, "--draws", "8", "--device", "cpu", "--out", str(out)]
    sizes = ["--reference", "10x16/16/4", "--step", "2x4/4/2", "--step", "10x8/8/2:16"]
    assert gradient_noise.main([*words, *sizes], said.append) == 0, said
    record = json.loads(out.read_text())
    low, high = record["rows"]
    assert low["cosine"] < high["cosine"]
    assert (low["classes"], low["vectors"], high["vectors"]) == (2, None, 16)
    assert str(tmp_path) not in out.read_text()
    assert gradient_noise.main([*words, "--reference", "10x16", "--step", "2x4/4/2"], said.append) == 2
    assert "10x64/256/32:16" in said[-1]
