"""What the Sample tab asks for: images, guidance side by side, walks, nearest training images."""

import io
import math
import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from driftgen.generators.base import Noise
from driftgen.pipeline import DriftPipeline
from driftgen.studio.app.downloads import Downloads, zip_pictures
from driftgen.studio.app.tab_html import show_pictures
from driftgen.studio.model_list import list_models, list_runs
from driftgen.studio.requests_and_answers import GUIDANCE_VALUES, Pictures, SampleRequest
from driftgen.studio.sampler import BATCH, WALK, Sampler, interpolate
from tests.support.helpers import fails
from tests.support.studio_folders import add_run, make_folders


@pytest.fixture
def folders(tmp_path):
    return make_folders(tmp_path)


@pytest.fixture
def sampler(folders):
    return Sampler(folders, "cpu")


def decoded(content):
    return Image.open(io.BytesIO(content))


def same(content, image):
    return np.array_equal(np.asarray(decoded(content)), np.asarray(image))


def test_shipped_models_come_first_then_runs(folders, sampler):
    add_run(folders, "old")
    add_run(folders, "group/deeper")
    (folders.runs / "empty").mkdir()
    (folders.runs / ".hidden").mkdir()
    half = add_run(folders, "half")
    shutil.rmtree(half / "model")  # a run before its first checkpoint
    broken = add_run(folders, "broken")
    (broken / "model" / "config.json").write_text("{")
    entries = sampler.list_models()
    shipped = [entry.name for entry in entries if "ships with" in entry.label]
    assert shipped == [entry.name for entry in entries[: len(shipped)]]
    assert "digits" in shipped
    assert {entry.label for entry in entries[len(shipped) :]} == {"run old", "run group/deeper"}
    assert set(list_runs(folders)) == {"old", "group/deeper", "half", "broken"}
    assert list_models(folders, "policy") == [e for e in list_models(folders, "policy") if "ships" in e.label]


def test_images_are_those_of_the_pipeline(sampler):
    request = SampleRequest("digits", ("3", "7"), guidance=2.0, seed=5, number=6)
    pictures = sampler.sample(request)
    expected = DriftPipeline.from_pretrained("digits")(
        ["3", "7"], guidance=2.0, seed=5, num_images=6, output="pil"
    )
    assert len(pictures.files) == 6
    assert all(same(f, image) for f, image in zip(pictures.files, expected, strict=True))
    assert pictures.captions == ("3", "7") * 3
    assert pictures.note.startswith("6 images: 1 network call each, ")
    assert pictures.note.endswith(" ms per image on cpu.")
    one = sampler.sample(SampleRequest("digits", number=1)).note
    assert one.startswith("1 image: 1 network call, ")


def test_facts_of_a_model(sampler, folders):
    facts = sampler.describe("digits")
    assert facts.classes == tuple("0123456789")
    assert facts.guidance == 1.5
    assert facts.highest == 8  # no range on record
    assert sampler.describe("cifar10").highest == 4  # trained on 1 to 3
    add_run(folders)
    assert len(sampler.describe(str(folders.runs / "old")).classes) == 10


def test_one_noise_at_several_guidance_values(sampler):
    request = SampleRequest("digits", ("4",), seed=2, number=3, mode="guidance")
    pictures = sampler.sample(request)
    assert (pictures.columns, len(pictures.files)) == (len(GUIDANCE_VALUES), 3 * len(GUIDANCE_VALUES))
    pipe = DriftPipeline.from_pretrained("digits")
    for column, alpha in enumerate(GUIDANCE_VALUES):
        expected = pipe("4", guidance=alpha, seed=2, num_images=3)
        for row in range(3):
            assert same(pictures.files[row * pictures.columns + column], expected[row])
    assert pictures.column_names[0] == "guidance 1"


def test_a_walk_begins_and_ends_at_its_seeds(sampler):
    pictures = sampler.sample(SampleRequest("digits", ("8",), None, 1, 2, "walk", second_seed=9))
    assert (pictures.columns, len(pictures.files)) == (WALK, 2 * WALK)
    pipe = DriftPipeline.from_pretrained("digits")
    for end, seed in ((0, 1), (WALK - 1, 9)):
        expected = pipe("8", seed=seed, num_images=2)
        for row in range(2):
            found = np.asarray(decoded(pictures.files[row * WALK + end])).astype(int)
            assert abs(found - np.asarray(expected[row]).astype(int)).max() <= 1
    middle = pictures.files[WALK // 2]
    assert middle not in (pictures.files[0], pictures.files[WALK - 1])
    assert decoded(pictures.animation).n_frames == 2 * WALK - 2


def test_noise_on_a_walk_keeps_its_variance():
    random = torch.Generator().manual_seed(0)
    first, second = (
        Noise(torch.randn(1, 1, 200, 200, generator=random), torch.full((1, 2), i)) for i in range(2)
    )
    for t in (0.0, 0.3, 0.5, 1.0):
        between = interpolate(first, second, t)
        assert float(between.gaussian.std()) == pytest.approx(1, abs=0.02)
        assert between.style.tolist() == [[0, 0]]
    assert torch.allclose(interpolate(first, second, 1.0).gaussian, second.gaussian, atol=1e-6)
    half = interpolate(first, second, 0.5).gaussian
    assert torch.allclose(half, (first.gaussian + second.gaussian) / math.sqrt(2), atol=1e-6)


def test_nearest_training_images(sampler, folders):
    pictures = sampler.nearest(SampleRequest("digits", number=3))
    assert (pictures.columns, len(pictures.files)) == (6, 18)
    assert "1,437 training images" in pictures.note
    similarities = [float(text) for text in pictures.captions[1:6]]
    assert similarities == sorted(similarities, reverse=True)
    assert 0.5 < similarities[0] <= 1
    add_run(folders)
    assert len(sampler.nearest(SampleRequest(str(folders.runs / "old"), number=1)).files) == 6


def test_a_run_that_goes_on_is_loaded_again(sampler, folders):
    folder = add_run(folders)
    request = SampleRequest(str(folder), number=1)
    before = sampler.sample(request).files
    weights = folder / "model" / "model.safetensors"
    pipe = DriftPipeline.from_pretrained(folder)
    with torch.no_grad():
        for parameter in pipe.generator.parameters():
            parameter.mul_(0.5)
    shutil.rmtree(folder / "model")
    pipe.save_pretrained(folder / "model")
    assert weights.is_file()
    assert sampler.sample(request).files != before


def test_more_images_need_the_memory_of_one_batch(sampler, monkeypatch):
    pipe, sizes = sampler._pipeline("digits"), []
    forward = pipe.generator.forward
    monkeypatch.setattr(
        pipe.generator,
        "forward",
        lambda noise, *rest: sizes.append(len(noise.gaussian)) or forward(noise, *rest),
    )
    assert len(sampler.sample(SampleRequest("digits", number=64)).files) == 64
    assert sizes == [BATCH] * 4


def test_models_that_do_not_load_are_one_line(sampler, folders, tmp_path):
    def ask(model, **options):
        return lambda: sampler.sample(SampleRequest(str(model), **options))

    damaged = add_run(folders, "damaged")
    (damaged / "model" / "model.safetensors").write_bytes(b"x" * 100)
    fails(ask(damaged), "damaged")
    (folders.runs / "empty").mkdir()
    fails(ask(folders.runs / "empty"), "empty")
    half = add_run(folders, "half")
    shutil.rmtree(half / "model")
    fails(ask(half), "no model yet")
    outside = tmp_path / "outside"
    shutil.copytree(add_run(folders, "inside"), outside)
    for name in (outside, folders.runs / ".." / "outside", "..", "/"):
        fails(ask(name), "leads outside")
    (folders.runs / "link").symlink_to(outside)
    fails(ask(folders.runs / "link"), "leads outside")
    inner = add_run(folders, "inner")
    shutil.rmtree(inner / "model")
    (inner / "model").symlink_to(outside / "model")
    fails(ask(inner), "leads outside")
    for name in ("", "  ", "no such model", "a/b/c", "x\0y"):
        fails(ask(name), "model")
    fails(ask("digits", classes=("eleven",)), "eleven")
    fails(ask("digits", number=65), "1 to 64")
    fails(ask("digits", number=0), "1 to 64")
    fails(ask("digits", guidance=0.5), "guidance")
    fails(ask("digits", seed=-1), "seed")
    fails(ask("digits", mode="x"), "mode")
    assert len(sampler.sample(SampleRequest("digits", number=1)).files) == 1


def test_training_images_elsewhere_are_not_shown(sampler, folders, tmp_path):
    folder = add_run(folders)
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(
        text.replace("kind: digits", "kind: images").replace("path: null", "path: /etc")
    )
    fails(lambda: sampler.nearest(SampleRequest(str(folder), number=1)), "leads outside")
    (folder / "config.yaml").unlink()
    fails(lambda: sampler.nearest(SampleRequest(str(folder), number=1)), "are not here")


def test_files_to_download_have_safe_names():
    pictures = Pictures((b"1", b"2", b"3"), (8, 8), 0, ("../../etc", "a b/c", ""), "note")
    names = zipfile.ZipFile(io.BytesIO(zip_pictures(pictures))).namelist()
    assert names == ["000-etc.png", "001-a-b-c.png", "002.png"]


def test_names_from_a_model_are_escaped(sampler):
    pictures = sampler.sample(SampleRequest("digits", number=1))
    evil = Pictures(pictures.files, (8, 8), 1, ("<script>alert(1)</script>",), '"><em>', ("<i>",))
    downloads = Downloads()
    html = show_pictures(evil, "x", "<b>", downloads)
    assert "<script>" not in html
    assert "<i>" not in html
    assert "<em>" not in html
    address = html.partition('href="/download/')[2].partition('"')[0]
    assert zipfile.ZipFile(io.BytesIO(downloads.get(f"/download/{address}"))).namelist()
