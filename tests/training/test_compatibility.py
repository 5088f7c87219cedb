"""Runs, recipes and models written by an older version of the package still load and resume."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from driftgen import DriftPipeline, load_model
from driftgen.generators import ImageMLP
from driftgen.support.distributed import Distributed
from driftgen.training.checkpoint import Checkpoints
from driftgen.training.recipes import load_recipe
from driftgen.training.trainer import train
from tests.support.runs import Silent

OLDER = Path(__file__).parents[1] / "data" / "older_run"
DIT = Path(__file__).parents[1] / "data" / "older_dit"


def test_an_older_model_loads_and_samples():
    assert isinstance(load_model(OLDER / "model"), ImageMLP)
    images = DriftPipeline.from_pretrained(OLDER)(labels=[0, 3], seed=0, output="tensor")
    assert images.shape == (2, 1, 8, 8)
    assert images.isfinite().all()


def test_an_older_dit_gives_the_same_images():
    """Its options have older names, and its weights some that nothing reads."""
    images = DriftPipeline.from_pretrained(DIT)([0, 1], seed=0, output="tensor").numpy()
    expected = np.load(DIT / "expected.npy")
    assert expected.std() > 0.1
    np.testing.assert_allclose(images, expected, rtol=1e-5, atol=1e-6)


def test_an_older_checkpoint_resumes_as_it_would_have_gone_on(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(OLDER, folder)
    config, view = load_recipe(str(folder / "config.yaml"), [], "train"), Silent()
    assert config.ema_warmup  # the default of a new run; the run itself started without
    assert config.optim.schedule == "constant"
    assert train(config, folder, Distributed.start("cpu"), view)
    assert any("after step 10" in line for line in view.said)
    expected = json.loads((OLDER / "expected.json").read_text())
    rows = {str(row["step"]): row for row in view.rows}
    assert rows.keys() == expected.keys()
    for step, row in expected.items():
        assert rows[step]["loss"] == pytest.approx(row["loss"], rel=1e-5)
        assert rows[step]["gradient_norm"] == pytest.approx(row["gradient_norm"], rel=1e-4)
    # Averages continue without warm-up, and the same command resumes again.
    assert "ema_warmup: false" in (folder / "config.yaml").read_text()
    before, after = (Checkpoints(run / "checkpoints").load() for run in (OLDER, folder))
    assert "ema" not in before.record
    assert after.record["ema"] == {"updates": 20, "initial_share": {"0.995": pytest.approx(0.995**20)}}
    names = [name for name in before.tensors if name.startswith("ema/")]
    moved = max((after.tensors[n] - before.tensors[n]).abs().max() for n in names)
    trained = max((after.tensors[n] - after.tensors[f"model/{n.split('/')[2]}"]).abs().max() for n in names)
    assert 0 < moved < 0.2 * trained
    assert train(config, folder, Distributed.start("cpu"), view)
    assert (
        view.said[-1]
        == "resumed after step 20: the run is complete; train longer with --set optim.steps=40 --override"
    )
