"""The folder of a run is a model: everything that takes a model takes its run as well."""

import pytest
import torch
import torchmetrics.image.kid  # noqa: F401, its import takes longer than a test may

import driftgen as dg
from driftgen.model_io import to_official
from driftgen.support.distributed import Distributed
from driftgen.training.pretrain import pretrain
from tests.support.fsdp_runs import config
from tests.support.helpers import fails
from tests.support.runs import Silent, run

# A DiT: the authors' format has no other generator.
DIT = [
    "generator.kind=dit",
    "generator.options={patch_size: 4, hidden_size: 32, depth: 1, num_heads: 2}",
    "encoders=[]",
    "optim.steps=2",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "dit"
    run(folder, *DIT)
    return folder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mae"
    changes = ["optim.steps=2", "mae.finetune_steps=1", "mae.options.base_channels=40"]
    assert pretrain(config("pretrain", *changes), folder, Distributed.start("cpu"), Silent())
    return folder


def same_weights(a, b):
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("which", ["trained", "encoder"])
def test_load_model(which, request):
    folder = request.getfixturevalue(which)
    expected = dg.load_model(folder / "model")
    for source in (folder, str(folder), f"{folder}/"):
        assert same_weights(dg.load_model(source), expected)


def test_a_pipeline(trained):
    pipe = dg.DriftPipeline.from_pretrained(trained)
    assert same_weights(pipe.generator, dg.load_model(trained / "model"))
    assert pipe.class_names is not None


@pytest.mark.parametrize("which", ["trained", "encoder"])
def test_convert_to_the_authors_format(which, tmp_path, here, request):
    folder = request.getfixturevalue(which)
    done = here("convert", "to-official", folder, tmp_path / "official")
    assert done.returncode == 0, done.stderr
    assert same_weights(dg.load_official(tmp_path / "official"), dg.load_model(folder))


@pytest.mark.parametrize("which", ["trained", "encoder"])
def test_convert_to_shards(which, tmp_path, here, request):
    folder = request.getfixturevalue(which)
    done = here("convert", "shards", folder, tmp_path / "shards", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert same_weights(dg.load_model(tmp_path / "shards"), dg.load_model(folder))


def test_convert_state(trained, tmp_path, here):
    done = here("convert", "state", trained, tmp_path / "state", "--bits", "32")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("inside", ["", "model"])
def test_convert_official_says_that_a_run_needs_no_conversion(trained, inside, tmp_path, here):
    done = here("convert", "official", trained / inside, tmp_path / "out")
    assert done.returncode == 2
    assert "holds a driftgen model already" in done.stderr
    assert "driftgen convert to-official" in done.stderr
    assert not (tmp_path / "out").exists()


def test_sample(trained, tmp_path, here):
    done = here("sample", trained, "--labels", "0", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_neighbors_with_the_encoder_of_a_run(trained, encoder, tmp_path, here):
    words = ["--encoder", encoder, "--samples", "4", "--show", "1", "--nearest", "1", "--device", "cpu"]
    done = here("neighbors", trained, *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_eval_with_the_encoder_of_a_run(trained, encoder, tmp_path, here):
    words = ["--encoder", encoder, "-n", "70", "--device", "cpu"]
    done = here("eval", trained, *words, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr


def test_initial_weights_and_encoder_of_another_run(trained, encoder, tmp_path):
    entry = f"encoders=[{{kind: mae, path: {encoder}}}]"
    done, view = run(tmp_path / "run", *DIT, entry, f"init={trained}")
    assert done
    assert f"generator weights from {trained}" in view.said


def test_an_autoencoder_without_a_classifier_has_no_released_form(tmp_path):
    folder = dg.save_model(dg.features.ResNetMAE(1, 32, (1, 1)), tmp_path / "mae")
    fails(lambda: to_official(folder, tmp_path / "out"), "needs a classifier beside the decoder")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_neither_says_so(tmp_path):
    fails(lambda: dg.load_model(tmp_path), "holds no model")
