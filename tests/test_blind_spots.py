"""Kernel distances in the features of an encoder, for whole images and crops."""

import json

import numpy as np
import pytest
import torch

from driftgen.data.images import digits
from driftgen.features import ResNetMAE
from driftgen.generators import UNet2D
from driftgen.model_io import save_model
from driftgen.pipeline import DriftPipeline
from tests.support.efficientnet_weights import efficientnet_state
from tools import blind_spots
from tools.records import Results


@pytest.fixture
def encoder():  # more channels than groups of a GroupNorm, whose means would be constants
    torch.manual_seed(0)
    return ResNetMAE(in_channels=1, base_channels=64, blocks=(1, 1, 1, 1), patchify=1, decoder=False).eval()


def test_distances_see_what_differs(encoder):
    images, _ = digits("train")
    images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    real, other = images[:100], images[100:200]
    edge = other.clone()
    edge[:, :, 0] += 2.0  # outside the central 70%
    rows = blind_spots.measure(encoder, real, {"real": other, "noisy": other + 0.5, "edge": edge})
    found = {(row["view"], row["samples"]): row["layer1_mean"] for row in rows}
    assert len(rows) == 6
    for view in ("whole", "crop"):
        assert abs(found[view, "real"]) < 0.1 * found[view, "noisy"]
    assert found["whole", "edge"] > 10 * abs(found["whole", "real"])
    assert found["crop", "edge"] == pytest.approx(found["crop", "real"])


def test_table(tmp_path):
    features = ("layer1_mean", "layer2_mean", "layer3_mean", "layer4_mean")
    row = {"view": "crop", "samples": "real", **dict.fromkeys(features, 0.00123)}
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "blind-spots.json").write_text(f'{{"rows": [{row}]}}'.replace("'", '"'))
    line = blind_spots.table(Results(tmp_path)).splitlines()[-1]
    assert line == "| real | crop | 0.0012 | 0.0012 | 0.0012 | 0.0012 |"


def test_command(tmp_path, encoder, capsys):
    images, labels = digits("train")
    pixels = ((images[:, 0].numpy() + 1) * 127.5).round().astype(np.uint8)
    np.savez(tmp_path / "train.npz", images=pixels, labels=labels.numpy())
    save_model(encoder, tmp_path / "mae")
    arguments = [str(tmp_path / "train.npz"), "digits=digits", "--size", "8", "--per-class", "2"]
    out = ["--out", str(tmp_path / "record.json")]
    assert blind_spots.main([str(tmp_path / "mae"), *arguments, *out]) == 0
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()
    assert blind_spots.main(["digits", *arguments, *out]) == 2
    assert "expected ResNetMAE" in capsys.readouterr().err
    for encoder, message in (
        ("{kind: foo}", "'foo' is not registered"),
        ("{kind: mae, path: mae, option: 1}", "encoders.0.option is not known"),
    ):
        assert blind_spots.main([encoder, *arguments, *out]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_an_encoder_of_another_kind(tmp_path):
    torch.save(efficientnet_state(), tmp_path / "weights.pth")
    pixels = torch.randint(256, (40, 8, 8, 3), generator=torch.Generator().manual_seed(0)).numpy()
    np.savez(tmp_path / "train.npz", images=pixels.astype(np.uint8), labels=np.arange(40) % 10)
    entry = f"{{kind: efficientnet-lite0, path: {tmp_path / 'weights.pth'}, options: {{size: 32}}}}"
    record = tmp_path / "record.json"
    model = DriftPipeline(
        UNet2D(
            input_size=8,
            in_channels=3,
            num_classes=10,
            widths=(8,),
            groups=8,
            blocks=(1,),
            attention_levels=(),
        )
    )
    model.save_pretrained(tmp_path / "model")
    arguments = [str(tmp_path / "train.npz"), f"net={tmp_path / 'model'}", "--size", "8", "--per-class", "2"]
    assert blind_spots.main([entry, *arguments, "--out", str(record)]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert [row["samples"] for row in rows] == ["real", "net"] * 2
    assert {"stage2_mean", "stage3_mean", "stage5_mean", "stage7_mean"} < set(rows[0])
