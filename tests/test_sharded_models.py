"""Sharded models and dtypes: written, read, and refused in one line when damaged."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import driftgen as dg
from tests.support.pipelines import small

INDEX = "model.safetensors.index.json"


@pytest.fixture
def pipe():
    return dg.DriftPipeline(small())


def weights(folder):
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("model"))


@pytest.mark.parametrize("size", ["20KB", 20_000])
def test_shards_hold_the_same_weights(pipe, size, tmp_path):
    pipe.save_pretrained(tmp_path, max_shard_size=size)
    names = weights(tmp_path)
    count = len(names) - 1
    assert count > 1
    assert names == [*(f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)), INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"].keys() == pipe.generator.state_dict().keys()
    back = dg.DriftPipeline.from_pretrained(tmp_path)
    assert torch.equal(back(1, seed=0, output="latent"), pipe(1, seed=0, output="latent"))


def test_saving_again_leaves_no_stale_files(pipe, tmp_path):
    for size, files in (("20KB", None), ("40KB", None), ("5GB", ["model.safetensors"]), ("20KB", None)):
        pipe.save_pretrained(tmp_path, max_shard_size=size, overwrite=True)
        listed = files or sorted({*json.loads((tmp_path / INDEX).read_text())["weight_map"].values(), INDEX})
        assert weights(tmp_path) == listed
        assert sorted({path.name for path in tmp_path.iterdir()} - set(listed)) == [
            "README.md",
            "config.json",
        ]
        dg.load_model(tmp_path)


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_weights_of_8_bits(pipe, size, tmp_path):
    """Every weight is off by at most half a step of its channel."""
    pipe.save_pretrained(tmp_path / "float32")
    pipe.save_pretrained(tmp_path / "int8", dtype=torch.int8, max_shard_size=size)
    bytes_of = {
        name: sum(p.stat().st_size for p in (tmp_path / name).glob("*.safetensors"))
        for name in ("float32", "int8")
    }
    assert bytes_of["int8"] < 0.4 * bytes_of["float32"]
    back, exact = dg.load_model(tmp_path / "int8").state_dict(), pipe.generator.state_dict()
    assert back.keys() == exact.keys()
    for name, weight in exact.items():
        assert back[name].dtype == weight.dtype
        steps = weight.abs().flatten(1).amax(1) / 127 if weight.ndim > 1 else torch.zeros(len(weight))
        error = (back[name] - weight).abs().view(len(weight), -1).amax(1)
        assert (error <= 0.5001 * steps).all(), name
    matrix = next(name for name, weight in exact.items() if weight.ndim > 1 and weight.numel() > 4096)
    assert not torch.equal(back[matrix], exact[matrix])


def test_8_bits_with_the_wrong_scales_are_refused(pipe, tmp_path):
    pipe.save_pretrained(tmp_path, dtype=torch.int8)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith(".int8_scale"))
    save_file({**tensors, name: tensors[name][:-1]}, path)
    with pytest.raises(
        dg.InputError, match=r"model.safetensors cannot be read as weights .* do not fit weights"
    ):
        dg.load_model(tmp_path, verify=False)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(dg.InputError, match="8 bits without its scales"):
        dg.load_model(tmp_path, verify=False)
    save_file({**tensors, "more.int8_scale": tensors[name].clone()}, path)
    with pytest.raises(dg.InputError, match=r"unknown: more.int8_scale"):
        dg.load_model(tmp_path, verify=False)


def test_a_failed_save_leaves_the_old_model(pipe, tmp_path, monkeypatch):
    pipe.save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(dg.InputError, match="max_shard_size='large'"):
        pipe.save_pretrained(tmp_path, max_shard_size="large", overwrite=True)

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        pipe.save_pretrained(tmp_path, max_shard_size="20KB", overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_dtype_of_the_saved_weights(pipe, tmp_path):
    pipe.save_pretrained(tmp_path, dtype=torch.bfloat16)
    assert next(pipe.generator.parameters()).dtype == torch.float32
    assert {v.dtype for v in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert dg.load_model(tmp_path).positions.dtype == torch.bfloat16
    with pytest.raises(dg.InputError, match=r"dtype=torch.int16: choose torch.int8 or a floating-point type"):
        pipe.save_pretrained(tmp_path, dtype=torch.int16, overwrite=True)


def shard(folder, i=0):
    return sorted(folder.glob("model-*.safetensors"))[i]


def reindex(**changes):
    return lambda f: (f / INDEX).write_text(json.dumps(json.loads((f / INDEX).read_text()) | changes))


def swap_names(folder):
    tensors = load_file(shard(folder))
    name = next(iter(tensors))
    tensors["other"] = tensors.pop(name)
    save_file(tensors, shard(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: shard(f, 1).unlink(),
            ".safetensors does not exist: the folder is incomplete or damaged, copy it again",
        ),
        (lambda f: shard(f).write_bytes(b"short"), ".safetensors cannot be read as weights"),
        (
            lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-9]),
            ".safetensors cannot be read as weights",
        ),
        (swap_names, f"does not fit {INDEX}; unknown: other; missing: "),
        (lambda f: (f / INDEX).write_text("{"), f"{INDEX} cannot be read as an index"),
        (reindex(weight_map=3), f"{INDEX} cannot be read as an index"),
        (reindex(weight_map={"a": "../../secret.safetensors"}), "is not the name of a shard"),
        (lambda f: (f / INDEX).unlink(), "model.safetensors does not exist: the folder is incomplete"),
    ],
)
def test_damage_is_one_line(pipe, change, message, tmp_path):
    pipe.save_pretrained(tmp_path, max_shard_size="20KB")
    change(tmp_path)
    with pytest.raises(dg.InputError) as error:
        dg.load_model(tmp_path, verify=False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
