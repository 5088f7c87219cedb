"""Models that ship with the package: found by name, with the figures on record."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.demo import EACH, GUIDANCE
from driftgen.evaluation.digits import evaluate_digits
from driftgen.interop.model_sources import holds_policy
from driftgen.interop.packaged import FOLDER, find_packaged, packaged_names
from driftgen.model_io import save_model
from driftgen.policy.rollout import run_rollouts
from driftgen.report.evaluation_files import format_rows
from driftgen.support.checksum import weights_checksum
from tools.packaged_cards import packaged_card

RESULTS = Path(__file__).parents[2] / "results"
LARGEST, LARGEST_POLICY = 30e6, 15e6  # bytes


@pytest.mark.parametrize("name", packaged_names())
def test_a_packaged_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    largest = LARGEST_POLICY if holds_policy(name) else LARGEST
    assert sum(path.stat().st_size for path in (FOLDER / name).rglob("*")) < largest
    if holds_policy(name):
        policy = dg.DriftingPolicy.from_pretrained(name, device="cpu")
        shapes = policy.network.observations.items()
        history = {key: np.zeros((2, policy.observed, *shape), np.float32) for key, shape in shapes}
        assert policy.predict(history, seed=0).shape == (2, policy.horizon, policy.network.action_size)
    else:
        assert len(dg.DriftPipeline.from_pretrained(name)([0, 1])) == 2
    card = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    # python -m tools.packaged_cards writes them.
    assert card == packaged_card(name)
    assert f'from_pretrained("{name}")' in card
    assert "license: apache-2.0\n" in card
    assert "- data: " in card
    assert "Evaluation:" in card


def test_the_digits_are_those_of_the_demo():
    record = json.loads((RESULTS / "demo-digits" / "evaluation.json").read_text())
    (row,) = dg.DriftPipeline.from_pretrained("digits").source["evaluation"]["rows"]
    shown = record["figures"]
    assert row[:2] == [f"{record['guidance']:g}", f"{shown['recognized']:.1%}"]
    assert row[2:] == [f"{shown['precision_heldout']:.3f}", f"{shown['recall_heldout']:.3f}"]
    labels = [label for label in range(10) for _ in range(EACH)]
    pipe = dg.DriftPipeline.from_pretrained("digits", batch_size=EACH)
    figures = evaluate_digits(pipe(labels, guidance=GUIDANCE, seed=0, output="tensor"), torch.tensor(labels))
    # Other processors round differently: a few of 1,000 samples may change sides.
    assert figures == pytest.approx(record["figures"], abs=0.005)


def test_the_figures_of_cifar10_are_those_of_these_weights():
    pipe = dg.DriftPipeline.from_pretrained("cifar10")
    card = (FOLDER / "cifar10" / "README.md").read_text(encoding="utf-8")
    for name in ("evaluation.json", "neighbors/neighbors.json"):
        record = json.loads((RESULTS / "cifar10" / name).read_text())
        assert record["weights"] == weights_checksum(pipe.generator), name
    rows = json.loads((RESULTS / "cifar10" / "evaluation.json").read_text())["rows"]
    best = min(rows, key=lambda row: row["FID"])
    assert best["guidance"] == pipe.guidance
    assert best["FID"] <= 15
    evaluation = pipe.source["evaluation"]
    assert [evaluation["columns"], evaluation["rows"]] == [*format_rows(rows)]
    assert f"| {best['guidance']:g} | {best['FID']:.2f} |" in card


def pusht_record(episodes):
    return json.loads((RESULTS / "policy" / "pusht" / episodes / "unet-8-bits.json").read_text())


@pytest.mark.parametrize("episodes", ["first", "fresh", "third"])
def test_the_scores_of_pusht_are_those_of_these_weights(episodes):
    policy = dg.DriftingPolicy.from_pretrained("pusht", device="cpu")
    shipped = pusht_record(episodes)["checkpoints"][-1]
    assert shipped["weights"] == f"{weights_checksum(policy.network)[:16]}, 1 calls"
    assert shipped["mean"] >= 0.86
    score = f"{shipped['mean']:.3f} ± {shipped['standard_error']:.3f}"
    assert score in (FOLDER / "pusht" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_policy_of_pusht_pushes():
    """Episodes on record, in the simulator; other processors round differently, and contacts amplify that."""
    pytest.importorskip("gym_pusht")
    record = pusht_record("first")
    seeds, policy = record["seeds"][:12], dg.DriftingPolicy.from_pretrained("pusht", device="cpu")
    rollouts = run_rollouts(policy, "pusht", record["observe"], seeds, processes=2)
    expected = record["checkpoints"][-1]["scores"][:12]
    assert np.mean([rollout.score for rollout in rollouts]) > np.mean(expected) - 0.15


def test_a_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()  # for example images
    assert dg.load_model("digits").config.hidden_size == 256
    save_model(dg.generators.ImageMLP(input_size=8, in_channels=1, hidden_size=16), tmp_path / "digits")
    assert dg.load_model("digits").config.hidden_size == 16


def test_unknown_names():
    assert find_packaged("no-such-model") is None
    assert find_packaged("..") is None
    with pytest.raises(dg.InputError, match=r"no-such-model does not exist: .* the package \(.*digits"):
        dg.load_model("no-such-model")
