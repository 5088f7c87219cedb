"""Backbones from transformers folders: maps, normalization, damaged folders."""

import importlib
import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from driftgen.errors import InputError
from driftgen.features.backbones import Backbone
from tests.support.backbone_networks import (
    Evil,
    normalized,
    tiny_convnext,
    tiny_dinov2,
    tiny_resnet,
    transformers,
)
from tests.support.helpers import fails


def test_convnext_folder(tmp_path):
    whole = tiny_convnext()
    whole.save_pretrained(tmp_path)
    assert "convnextv2.layernorm.weight" in load_file(tmp_path / "model.safetensors")
    model, x = Backbone(tmp_path), torch.rand(2, 3, 224, 224) * 2 - 1
    features = model.features(x)
    assert len(features) == 13
    assert torch.equal(model.model.layernorm.weight, whole.convnextv2.layernorm.weight)
    assert (model.model.layernorm.weight - 1).abs().max() > 0.1
    with torch.no_grad():
        want = whole.convnextv2(normalized(x), output_hidden_states=True)
    assert torch.allclose(features["global_mean"][:, 0], want.pooler_output, atol=1e-4)
    y = want.hidden_states[2]
    y = (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True, correction=0) + 1e-3)
    assert torch.allclose(features["convenxt_stage_1"], y.flatten(2).mT, atol=1e-4)


def test_resnet_folder(tmp_path):
    whole = tiny_resnet()
    whole.save_pretrained(tmp_path)
    model, x = Backbone(str(tmp_path), size=64), torch.rand(2, 3, 64, 64) * 2 - 1
    maps = model.encode(x)
    assert list(maps) == ["layer1", "layer2", "layer3", "layer4", "layer2_blk2", "layer3_blk2", "layer3_blk4"]
    with torch.no_grad():
        want = whole.resnet(normalized(x), output_hidden_states=True).hidden_states
    for i in range(1, 5):
        assert torch.allclose(maps[f"layer{i}"], want[i], atol=1e-5)
    assert torch.equal(maps["layer2_blk2"], maps["layer2"])
    assert not torch.equal(maps["layer3_blk2"], maps["layer3"])
    assert len(model.encode(x, every_k_block=0)) == 4
    features = model.features(x)
    assert features["layer1_mean_4"].shape == (2, 16, 16)
    assert features["layer3_std_4"].shape == (2, 1, 48)


def test_dinov2_folder(tmp_path):
    whole = tiny_dinov2()
    whole.save_pretrained(tmp_path)
    x = torch.rand(2, 3, 66, 40) * 2 - 1
    model = Backbone(tmp_path, size=56)
    maps = model.encode(x)
    assert {name: m.shape for name, m in maps.items()} == {f"stage{i}": (2, 16, 4, 4) for i in (2, 4, 6, 8)}
    assert len(model.features(x)) == 4 * 7
    with torch.no_grad():
        small = F.interpolate(normalized(x), size=(56, 56), mode="bilinear", antialias=True)
        want = whole(small).last_hidden_state[:, 1:]
    assert torch.allclose(maps["stage8"].flatten(2).mT, want, atol=1e-5)
    # size=None rounds to a multiple of the patch size: 66 x 40 pixels become 5 x 3 patches of 14.
    chosen = Backbone(tmp_path, size=None, stages=["stage8", "stage1"]).encode(x)
    assert {name: m.shape for name, m in chosen.items()} == {
        "stage1": (2, 16, 5, 3),
        "stage8": (2, 16, 5, 3),
    }


def test_other_backbones(tmp_path):
    """AutoBackbone supports more networks; Swin's backbone adds norms that trained weights lack."""
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[1, 2], window_size=4
    )
    transformers.SwinModel(config).save_pretrained(tmp_path)
    maps = Backbone(tmp_path, size=32).encode(torch.rand(1, 3, 32, 32))
    assert {name: m.shape for name, m in maps.items()} == {"stage1": (1, 8, 8, 8), "stage2": (1, 16, 4, 4)}


def test_a_transformers_model():
    config = transformers.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2)
    model = Backbone(transformers.ConvNextBackbone(config), size=32)
    assert list(model.encode(torch.rand(1, 1, 32, 32))) == ["stage2"]


def test_normalization_of_the_folder(tmp_path):
    tiny_resnet().save_pretrained(tmp_path)
    record, path = {}, tmp_path / "preprocessor_config.json"
    x = torch.rand(1, 3, 16, 16) * 2 - 1

    def seen(**options):
        path.write_text(json.dumps(record | options))
        return Backbone(tmp_path, size=None).preprocess(x)

    assert torch.allclose(seen(), normalized(x), atol=1e-6)
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert torch.allclose(seen(**halves), x, atol=1e-6)
    assert torch.allclose(seen(**halves, do_normalize=False), (x + 1) / 2, atol=1e-6)
    assert torch.allclose(seen(do_rescale=False, do_normalize=False), (x + 1) * 127.5, atol=1e-4)
    path.write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Backbone(tmp_path)
    given = Backbone(tiny_resnet().resnet, size=None, mean=(0, 0, 0), std=(1, 1, 1)).preprocess(x)
    assert torch.equal(given, (x + 1) / 2)


# --- wrong and damaged folders --------------------------------------------------------------------------


def test_wrong_folders(tmp_path, monkeypatch):
    fails(lambda: Backbone(tmp_path / "none"), "none does not exist")
    fails(lambda: Backbone(str(tmp_path / "none")), "none does not exist")
    fails(lambda: Backbone(tmp_path), "holds no config.json")
    (tmp_path / "config.json").write_text("{")
    fails(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    fails(lambda: Backbone(tmp_path / "config.json"), "is a file")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_network"}')
    fails(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    fails(lambda: Backbone(tmp_path), "vit is not a transformers backbone")
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    fails(
        lambda: Backbone("driftgen-test/no-such-model"),
        "^driftgen-test/no-such-model is neither a folder here nor in the local cache, and the Hugging Face",
    )


@pytest.mark.parametrize("make", [tiny_convnext, tiny_resnet, tiny_dinov2])
def test_damaged_folders(make, tmp_path):
    make().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    fails(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    weights.write_bytes(whole)
    tensors = load_file(weights)
    lost = [name for name in tensors if name.endswith("bias")][:9]
    save_file({n: t for n, t in tensors.items() if n not in lost}, weights, metadata={"format": "pt"})
    fails(lambda: Backbone(tmp_path), "lacks weights of a .*; missing: .* and [34] more")
    weights.unlink()
    fails(lambda: Backbone(tmp_path), "cannot be read as a backbone")


def test_folder_of_pickled_weights(tmp_path, capsys):
    """Tensors of pytorch_model.bin in older folders are loaded without executing code."""
    tiny_convnext().save_pretrained(tmp_path)
    x = torch.rand(1, 3, 32, 32)
    want = Backbone(tmp_path, size=32)(x)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert all(torch.equal(want[name], f) for name, f in Backbone(tmp_path, size=32)(x).items())
    capsys.readouterr()
    torch.save(tensors | {"more": Evil()}, tmp_path / "pytorch_model.bin")
    fails(lambda: Backbone(tmp_path), "cannot be read as a backbone")
    assert "executed" not in capsys.readouterr().out


def test_wrong_stages(tmp_path):
    tiny_dinov2().save_pretrained(tmp_path)
    tiny_resnet().save_pretrained(tmp_path / "resnet")
    fails(
        lambda: Backbone(tmp_path / "resnet", stages=["stage1"]),
        r"\['stage1'\] does not apply to resnet",
    )
    fails(lambda: Backbone(tmp_path, stages=["stage9"]), r"stages=\['stage9'\] must be chosen from stage1, ")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_channels": 1}))
    fails(lambda: Backbone(tmp_path), "cannot be read|use a network for 3 channels")
