"""Saving a model replaces files only when told to."""

import pytest

import driftgen as dg
from driftgen.tokenizers import TinyVAE
from tests.support.autoencoders import taesd_files
from tests.support.helpers import fails
from tests.support.pipelines import small
from tests.support.runs import run

HOLDS = "choose another folder, or pass overwrite=True"


def pipeline():
    return dg.DriftPipeline(small())


def save_model(folder, **options):
    return dg.save_model(small(), folder, **options)


def save_pipeline(folder, **options):
    return pipeline().save_pretrained(folder, **options)


def contents(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("save", [save_model, save_pipeline])
@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_a_saved_model_is_replaced_only_with_overwrite(save, size, tmp_path):
    save(tmp_path, max_shard_size=size)
    before = contents(tmp_path)
    fails(lambda: save(tmp_path), f"{tmp_path} holds .*{HOLDS}")
    assert contents(tmp_path) == before
    save(tmp_path, overwrite=True)
    assert contents(tmp_path) != before
    dg.load_model(tmp_path)


# Each of them would be lost, or mistaken for a part of the new model.
@pytest.mark.parametrize("save", [save_model, save_pipeline])
@pytest.mark.parametrize(
    "name",
    ["README.md", "config.json", "model.safetensors", "model-00001-of-00002.safetensors", "tokenizer/a.json"],
)
def test_a_file_of_a_saved_model_alone_is_kept_as_well(save, name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    fails(lambda: save(tmp_path), f"{name.split('/')[0]}.*{HOLDS}")
    assert contents(tmp_path) == {path.relative_to(tmp_path): b"precious"}


@pytest.mark.parametrize("save", [save_model, save_pipeline])
def test_other_files_do_not_matter(save, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    save(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_the_tokenizer_of_a_refused_save_is_not_written(tmp_path):
    out = tmp_path / "out"
    tokenizer = TinyVAE(taesd_files(tmp_path))
    net = dg.generators.DiT(
        input_size=8, in_channels=tokenizer.latent_channels, hidden_size=32, depth=1, num_heads=2
    )
    save_pipeline(out)
    before = contents(out)
    pipe = dg.DriftPipeline(net, tokenizer)
    fails(lambda: pipe.save_pretrained(out), HOLDS)
    assert contents(out) == before
    pipe.save_pretrained(out, overwrite=True)
    assert dg.DriftPipeline.from_pretrained(out).tokenizer.latent_channels == tokenizer.latent_channels


def test_training_replaces_the_model_of_its_run(tmp_path):
    run(tmp_path, "encoders=[]", "optim.steps=1")
    first = contents(tmp_path / "model")
    run(tmp_path, "encoders=[]", "optim.steps=2", override=True)
    assert contents(tmp_path / "model") != first
    assert dg.DriftPipeline.from_pretrained(tmp_path).source["step"] == 2
