"""Cached features of real images: the same training as without a cache."""

import pytest
import torch

from driftgen.data.arrays import ArrayImages
from driftgen.data.config import Augment
from driftgen.errors import InputError
from driftgen.features import ResNetMAE
from driftgen.model_io import save_model
from driftgen.support.distributed import Distributed
from driftgen.training.feature_cache import CachedRows, FeatureCache, choose_images
from driftgen.training.trainer import Training
from tests.support.accuracy import error
from tests.support.runs import config, final, run

FLIP = "data.augment={flip: true}"


def with_encoder(folder):
    torch.manual_seed(0)
    save_model(ResNetMAE(in_channels=1, base_channels=32, blocks=(1, 1), decoder=False), folder / "mae")
    return [f"encoders=[{{kind: mae, path: {folder / 'mae'}}}]", FLIP]


def some_images(n=7, **augment):
    pixels = torch.randint(256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return ArrayImages(pixels, torch.arange(n) % 2, ["a", "b"], Augment(**augment))


@pytest.mark.parametrize("flip", [False, True])
def test_rows_hold_the_features_of_the_loaded_images(flip, monkeypatch):
    monkeypatch.setattr("driftgen.training.feature_cache.ENCODED", 3)
    images = some_images(flip=flip)

    def encode(x):
        return {"pixels": x.flatten(1)[:, None], "left": x[..., :4].mean((2, 3))[:, None]}

    cache = FeatureCache(images, encode, torch.device("cpu"))
    rows, indices = CachedRows(images), torch.tensor([4, 0, 6, 6, 1, 1, 1])
    for first in (0, 5):
        chosen = rows.load(indices, 11, first)
        expected = encode(images.load(indices, 11, first))
        found = cache(chosen)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert bool((chosen >= 7).any()) is flip
    assert f"features of {14 if flip else 7} images" in str(cache)


def test_features_have_the_dtype_of_the_step():
    cache = FeatureCache(
        some_images(), lambda x: {"x": x.flatten(1)[:, None]}, torch.device("cpu"), torch.bfloat16
    )
    assert cache.tables["x"].dtype == torch.bfloat16


def test_training_without_an_encoder_is_equal_to_the_bit(tmp_path):
    changes = ["optim.steps=12", FLIP]
    done, view = run(tmp_path / "cached", *changes, "cache_features=true")
    assert done
    assert any("features of 2,874 images cached" in line for line in view.said)
    run(tmp_path / "plain", *changes)
    cached, plain = final(tmp_path / "cached"), final(tmp_path / "plain")
    assert cached.keys() == plain.keys()
    assert all(torch.equal(cached[name], plain[name]) for name in plain)


def test_gradient_with_an_encoder(tmp_path):
    changes = with_encoder(tmp_path)
    gradients = []
    for cached in ("true", "false"):
        task = Training(config(*changes, f"cache_features={cached}"), Distributed.start("cpu"))
        task.compute_gradient(3)
        gradients.append([p.grad for p in task.generator.parameters()])
    for cached, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(cached, plain, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["queue.kind=queue"], "set queue.kind=index"),
        (["data.augment={rotate: 5}"], "may flip images, but not crop, rotate"),
        (["data.augment={crop: random-resized}"], "may flip images, but not crop, rotate"),
    ],
)
def test_data_that_cannot_be_cached(changes, message):
    with pytest.raises(InputError, match=message):
        Training(config(*changes, "cache_features=true"), Distributed.start("cpu"))


def test_files_are_not_cached(tmp_path):
    from PIL import Image

    for label in "ab":
        (tmp_path / label).mkdir()
        Image.new("L", (8, 8)).save(tmp_path / label / "0.png")
    changes = ["data.kind=images", f"data.path={tmp_path}", "data.size=8", "data.channels=1"]
    with pytest.raises(InputError, match="must be in memory"):
        Training(config(*changes, "cache_features=true", "data.augment={}"), Distributed.start("cpu"))


def test_auto_caches_on_a_gpu_only():
    data = Training(config(FLIP), Distributed.start("cpu")).data
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_images("auto", data, gpu, queue=False) is data
    assert choose_images("auto", data, gpu, queue=True) is None
    assert choose_images("auto", data, cpu, queue=False) is None
    assert choose_images(True, data, cpu, queue=False) is data
    assert choose_images(False, data, gpu, queue=False) is None
    crop = Training(config("data.augment={crop: random-resized}"), Distributed.start("cpu")).data
    assert choose_images("auto", crop, gpu, queue=False) is None
    assert Training(config(FLIP, "cache_features=auto"), Distributed.start("cpu")).cache is None


@pytest.mark.cuda
def test_auto_caches_what_fits(monkeypatch):
    said = []
    assert Training(config(FLIP, "cache_features=auto"), Distributed.start("cuda"), said.append).cache
    assert said[0].startswith("features of 2,874 images cached")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**19, 2**30))
    task = Training(config(FLIP, "cache_features=auto"), Distributed.start("cuda"), said.append)
    assert task.cache is None
    assert said[1].startswith("features are computed at every step: the features of 2,874 images need")
    assert task.compute_gradient(0).isfinite()


@pytest.mark.cuda
def test_a_captured_step_reads_the_cache(tmp_path):
    """Two steps of the graph with different rows, against steps without cache and graph."""
    changes = with_encoder(tmp_path)
    gradients = []
    for more in (["cache_features=true"], ["cuda_graph=false"]):
        task = Training(config(*changes, *more), Distributed.start("cuda"))
        steps = []
        for step in (3, 4):
            task.generator.zero_grad()
            task.compute_gradient(step)
            steps.append([p.grad.clone() for p in task.generator.parameters()])
        gradients.append(steps)
    cached, plain = gradients
    for a, b in zip(cached, plain, strict=True):
        # TF32 products of batches of other sizes: not the same bits.
        assert all(error(x, y) < 0.02 for x, y in zip(a, b, strict=True))
    assert any(error(x, y) > 0.2 for x, y in zip(*cached, strict=True))  # other rows, other gradients


@pytest.mark.cuda
def test_too_large_for_the_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**19, 2**30))
    with pytest.raises(InputError, match=r"2,874 images need .* GiB, the GPU has 0.0 GiB free"):
        Training(config(FLIP, "cache_features=true"), Distributed.start("cuda"))
