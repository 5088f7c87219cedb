"""The latent cache: its content, its identity, and wrong input."""

import json
from itertools import pairwise

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from driftgen.data.images import open_images
from driftgen.data.latent_encoding import encode_images
from driftgen.data.latents import LatentCache, open_latents
from driftgen.support.rng import derive_generator
from driftgen.tokenizers import SDVAE, Identity, build_tokenizer
from driftgen.training.config import Augment, Data
from tests.support.autoencoders import kl_network
from tests.support.helpers import fails
from tests.support.latent_images import SHARDS, Images, names

# --- content ----------------------------------------------------------------------------------------------


def test_every_image_and_its_flipped_copy(tmp_path):
    data = Images()
    steps = []
    left = encode_images(
        data,
        Identity(),
        tmp_path,
        batch_size=3,
        shard_size=5,
        on_step=lambda done, total: steps.append((done, total)),
    )
    assert left == 0
    assert names(tmp_path) == ["cache.json", *SHARDS]
    assert data.loaded[16:] == list(range(23))  # the first 16 identify the dataset
    assert steps == [(3, 23), (5, 23), (8, 23), (10, 23), (13, 23), (15, 23), (18, 23), (20, 23), (23, 23)]
    for number, name in enumerate(SHARDS):
        shard = load_file(tmp_path / name)
        rows = torch.arange(5 * number, min(5 * number + 5, 23))
        images = data.load(rows, 0)
        assert torch.equal(shard["latents"], torch.stack([images, images.flip(-1)], 1))
        assert torch.equal(shard["labels"], data.labels[rows])
    index = json.loads((tmp_path / "cache.json").read_text())
    assert index["tokenizer"] == Identity().options()
    assert (index["images"], index["latent_shape"], index["class_names"]) == (23, [3, 4, 4], ["a", "b", "c"])
    assert [entry["samples"] for entry in index["shards"]] == [5, 5, 5, 5, 3]
    cache = LatentCache(tmp_path)
    assert (cache.shape, cache.class_names, cache.tokenizer) == (
        data.shape,
        data.class_names,
        index["tokenizer"],
    )
    assert torch.equal(cache.labels, data.labels)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_loading(tmp_path, dtype):
    data = Images(100)
    encode_images(data, Identity(), tmp_path, shard_size=7, dtype=dtype)
    cache = LatentCache(tmp_path)
    indices = torch.randint(100, (4000,))
    images, found = data.load(indices, 0), cache.load(indices, seed=3)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    # The left column is larger by one half, which shows the flip.
    flipped = found[:, 0, 0, 0] == found[:, 0, 0, 1]
    want = torch.where(flipped[:, None, None, None], images.flip(-1), images)
    assert torch.equal(found, want)
    assert 0.47 < flipped.float().mean() < 0.53
    assert flipped[indices == 5].unique().numel() == 2
    # The flips depend on the seed and the position in the draw, not on the parts.
    assert torch.equal(cache.load(indices, 3), found)
    assert not torch.equal(cache.load(indices, 4), found)
    cuts = [0, 1, 1023, 1024, 1025, 2500, 4000]
    parts = [cache.load(indices[a:b], 3, a) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(parts), found)
    assert torch.equal(LatentCache(tmp_path, flip=False).load(indices, 3), images)
    assert cache.load(indices[:0], 3).shape == (0, 3, 4, 4)
    fails(lambda: cache.load(torch.tensor([100]), 0), r"^indices are 100 ... 100, expected 0 ... 99")
    fails(lambda: cache.load(torch.tensor([-1]), 0), "^indices are ")
    cache.close()


def test_conditional_and_limit(tmp_path):
    data = Images(30)
    encode_images(data, Identity(), tmp_path, shard_size=7)
    config = Data(kind="latents", path=str(tmp_path))
    assert torch.equal(open_latents(config).labels, data.labels)
    few = open_latents(config.model_copy(update={"limit": 6}))
    assert few.labels.tolist() == [0, 1, 2, 0, 1, 2]
    every = open_latents(config.model_copy(update={"conditional": False, "limit": 4}))
    assert (every.labels.tolist(), every.class_names) == ([0] * 4, ["all"])
    assert torch.equal(every.load(torch.arange(4), 0)[:, 0, 0, 1] * 64 // 1, torch.arange(4.0))
    fails(lambda: every.load(torch.tensor([4]), 0), "^indices are ")
    fails(lambda: open_latents(Data(kind="latents")), "^data.path is missing: .*driftgen encode")


def test_only_the_flip_of_the_augmentation_applies_to_latents(tmp_path):
    encode_images(Images(30), Identity(), tmp_path, shard_size=7)
    versions = {}
    for flip in (False, True):
        config = Data(kind="latents", path=str(tmp_path), augment={"flip": flip})
        cache = open_latents(config)
        versions[flip] = {tuple(cache.load(torch.tensor([1]), seed).flatten().tolist()) for seed in range(20)}
    assert [len(versions[flip]) for flip in (False, True)] == [1, 2]
    for augment in ({"rotate": 5}, {"crop": "random-resized"}, {"shift": 1, "flip": True}):
        with pytest.raises(ValueError, match=rf"augment.{min(augment.keys() - {'flip'})} does not apply"):
            Data(kind="latents", path=str(tmp_path), augment=augment)


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kl")
    kl_network(levels=2).save_pretrained(folder)
    return folder


def test_posterior_noise(vae, tmp_path):
    """An image and its flipped copy share the posterior noise, independent of the batch size."""
    data, tokenizer = Images(10, side=6), SDVAE(vae)
    for name, size in (("a", 2), ("b", 64)):
        encode_images(data, tokenizer, tmp_path / name, batch_size=size, shard_size=4, seed=9)
    a, b = ([load_file(tmp_path / n / name)["latents"] for name in SHARDS[:3]] for n in "ab")
    with torch.no_grad():
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            assert torch.allclose(one, other, atol=1e-5)
            images = data.load(torch.arange(4 * number, min(4 * number + 4, 10)), 0)
            generator = derive_generator(9, number)
            noise = torch.stack([torch.randn(4, 3, 3, generator=generator) for _ in images])
            for side, shown in enumerate((images, images.flip(-1))):
                posterior = tokenizer.network.encode(shown).latent_dist
                want = 0.18215 * (posterior.mean + posterior.std * noise)
                assert torch.allclose(one[:, side], want, atol=1e-5)
    cache = LatentCache(tmp_path / "a")
    assert cache.shape == (4, 3, 3)
    # The options in the index rebuild the tokenizer.
    again = build_tokenizer(cache.tokenizer, vae)
    assert again.decode(cache.load(torch.arange(2), 0)).shape == (2, 3, 6, 6)


# --- identity ---------------------------------------------------------------------------------------------


def test_another_cache_is_refused(vae, tmp_path):
    torch.manual_seed(1)
    other_vae = SDVAE(vae)
    nn.init.normal_(next(other_vae.network.parameters()))
    data = Images(side=6)
    tokenizer = SDVAE(vae)

    class Altered(Images):
        def load(self, indices, seed, first=0):
            return super().load(indices, seed) + 0.25

    def encode(data=data, tokenizer=tokenizer, **options):
        return encode_images(data, tokenizer, tmp_path, **{"shard_size": 5, **options})

    for partly in (True, False):
        # Both an incomplete and a complete cache.
        assert encode(world=2) == 2 if partly else encode() == 0
        before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.*s*")}
        for other in (Images(22, 6), Images(side=6, classes=2), Images(side=6, names="abx"), Altered(side=6)):
            fails(lambda other=other: encode(other), "holds latents of other images: choose another folder")
        fails(lambda: encode(tokenizer=other_vae), "was written with another tokenizer")
        fails(lambda: encode(tokenizer=SDVAE(vae, sample=False)), "was written with another tokenizer")
        fails(lambda: encode(Images(side=4), SDVAE(vae)), "other images")
        for options in ({"seed": 1}, {"dtype": "float16"}, {"shard_size": 6}):
            fails(lambda options=options: encode(**options), r"other options, .*\"shard_size\": 5")
        assert before == {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.*s*")}
    # The batch size is not part of the identity.
    assert encode(tokenizer=SDVAE(vae, batch_size=3), batch_size=2) == 0
    # A shard of another cache among the right ones.
    encode_images(Images(side=6, names="xyz"), tokenizer, tmp_path / "other", shard_size=5)
    (tmp_path / "other" / SHARDS[1]).replace(tmp_path / SHARDS[1])
    fails(lambda: LatentCache(tmp_path), f"{SHARDS[1]} holds latents of other images")
    fails(encode, f"{SHARDS[1]} holds latents of other images")


def test_folders_and_arrays(tmp_path):
    """A folder is identified by its relative file names, an array by its pixels."""
    place = tmp_path / "images"
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((8, 8), 50).convert("RGB").save(path)
    config = Data(path=str(place), size=8, workers=0)
    data = open_images(config)
    encode_images(data, Identity(), tmp_path / "cache")
    cache = LatentCache(tmp_path / "cache", flip=False)
    assert torch.equal(cache.load(torch.arange(3), 0), data.load(torch.arange(3), 0))
    assert cache.class_names == ["cat", "dog"]
    place.rename(tmp_path / "moved")
    moved = config.model_copy(update={"path": str(tmp_path / "moved")})
    assert encode_images(open_images(moved), Identity(), tmp_path / "cache") == 0
    (tmp_path / "moved/cat/2.png").rename(tmp_path / "moved/cat/3.png")
    fails(lambda: encode_images(open_images(moved), Identity(), tmp_path / "cache"), "other images")
    turned = moved.model_copy(update={"augment": Augment(flip=True)})
    fails(lambda: encode_images(open_images(turned), Identity(), tmp_path / "cache"), "^data.augment changes")
    digits = open_images(Data(kind="digits", channels=1))
    encode_images(digits, Identity(1), tmp_path / "digits")
    digits.pixels[700, 0, 3, 3] ^= 1
    fails(lambda: encode_images(digits, Identity(1), tmp_path / "digits"), "other images")


# --- wrong input ------------------------------------------------------------------------------------------


def test_wrong_input(tmp_path):
    data = Images()
    fails(lambda: encode_images(data, Identity(), tmp_path, batch_size=0), "^batch_size=0 must be at least 1")
    fails(lambda: encode_images(data, Identity(), tmp_path, shard_size=0), "^shard_size=0")
    fails(
        lambda: encode_images(data, Identity(), tmp_path, rank=2, world=2), r"^rank=2 must be in 0 \.\.\. 1"
    )
    fails(lambda: encode_images(data, Identity(), tmp_path, dtype="float31"), "did you mean 'float32'")
    tokenizer = Identity()
    tokenizer.factor = 3
    fails(lambda: encode_images(data, tokenizer, tmp_path), "^images are 4x4 pixels: .* multiple of 3")
    assert list(tmp_path.iterdir()) == []
    fails(lambda: LatentCache(tmp_path), "holds no latent cache: create one with driftgen encode")
    fails(lambda: LatentCache(tmp_path / "none"), "holds no latent cache")
    index = tmp_path / "cache.json"
    index.write_text("{")
    fails(
        lambda: LatentCache(tmp_path),
        "cache.json cannot be read as .*delete it and run driftgen encode again",
    )
    fails(lambda: encode_images(data, Identity(), tmp_path), "cache.json cannot be read")
    index.write_text("[]")
    fails(
        lambda: LatentCache(tmp_path),
        "cache.json holds no JSON object: the index of a latent cache is expected",
    )
    index.unlink()
    encode_images(data, Identity(), tmp_path)
    record = json.loads(index.read_text())
    index.write_text(json.dumps(record | {"version": 2}))
    fails(lambda: LatentCache(tmp_path), "has version 2, expected 1")
    del record["identity"]
    index.write_text(json.dumps(record))
    fails(
        lambda: LatentCache(tmp_path),
        r"cache.json is damaged \(identity: Field required\): delete it and run",
    )
    fails(lambda: encode_images(data, Identity(), tmp_path), "cache.json is damaged")


def test_numbers_of_the_index_are_whole(tmp_path):
    """JSON written by another program may hold 6.0: it is 6, also where only an integer works."""
    encode_images(Images(6), Identity(), tmp_path, shard_size=4)
    index = tmp_path / "cache.json"
    record = json.loads(index.read_text())
    expected = LatentCache(tmp_path).load(torch.arange(6), 0)
    index.write_text(json.dumps(record | {"images": 6.0, "latent_shape": [3.0, 4.0, "4"]}))
    cache = LatentCache(tmp_path)
    assert cache.shape == (3, 4, 4)
    assert torch.equal(cache.load(torch.arange(6), 0), expected)
    index.write_text(json.dumps(record | {"images": 1e9}))
    fails(lambda: LatentCache(tmp_path), "is an incomplete latent cache of 250,000,000 shards")
    index.write_text(json.dumps(record | {"images": 6.5}))
    fails(lambda: LatentCache(tmp_path), r"cache.json is damaged \(images: ")


def test_a_shard_that_disappears_during_use(tmp_path):
    encode_images(Images(), Identity(), tmp_path, shard_size=5)
    cache = LatentCache(tmp_path)
    with safe_open(tmp_path / SHARDS[0], framework="pt") as shard:
        assert set(shard.keys()) == {"latents", "labels", "checksums"}
    (tmp_path / SHARDS[3]).unlink()
    assert len(cache.load(torch.arange(5), 0)) == 5
    fails(lambda: cache.load(torch.arange(23), 0), f"{SHARDS[3]} does not exist: run driftgen encode again")
