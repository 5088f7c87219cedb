"""Fréchet distances in layers of Inception: a set is near its own kind, at every depth."""

import json

import numpy as np
import torch

from driftgen.data.images import digits
from driftgen.evaluation.inception import LoadedInception
from driftgen.support.images import rounded_bytes
from tools import layer_distances
from tools.records import Results


class Colors(torch.nn.Module):
    """Every layer averages to the colors of an image."""

    def __init__(self):
        super().__init__()
        for name in layer_distances.LAYERS:
            self.add_module(name, torch.nn.Identity())

    def forward(self, images):
        for name in layer_distances.LAYERS:
            self.get_submodule(name)(images)


def test_distances_of_shifted_and_scaled_colors():
    colors = torch.rand(400, 3, generator=torch.Generator().manual_seed(0)) * 60 + 60
    images = colors.round().to(torch.uint8)[:, :, None, None].expand(-1, -1, 4, 4)
    row, wide = layer_distances.measure(Colors(), images, {"shifted": images + 10, "wide": 2 * images - 90})
    variance = images[:, :, 0, 0].double().var(0).sum()
    for layer in layer_distances.LAYERS:
        assert abs(row[layer]["means"] - 300 / variance) < 1e-9
        assert abs(row[layer]["distance"] - 300 / variance) < 1e-6
        # Twice as wide: tr(Σ + 4Σ - 2 · 2Σ) = tr Σ, beside the means.
        assert abs(wide[layer]["distance"] - wide[layer]["means"] - 1) < 1e-6


def test_command(tmp_path, monkeypatch):
    """Stands in for Inception, whose weights do not ship: the record has the exact pixels of real images."""
    images, labels = digits("train")
    pixels = rounded_bytes(images).expand(-1, 3, -1, -1)
    np.savez(tmp_path / "train.npz", images=pixels.permute(0, 2, 3, 1).numpy(), labels=labels.numpy())
    loaded = LoadedInception(Colors(), "")
    monkeypatch.setattr(layer_distances, "load_inception", lambda path: loaded)
    record = tmp_path / "record.json"
    arguments = ["inception.pt", str(tmp_path / "train.npz"), "gray=digits", "--size", "8"]
    assert layer_distances.main([*arguments, "--per-class", "30", "--out", str(record)]) == 0
    found = json.loads(record.read_text())
    assert found["images_per_set"] == 300
    assert str(tmp_path) not in record.read_text()
    chosen = torch.stack([(labels == c).nonzero()[:60, 0] for c in range(10)])
    halves = (pixels[half.flatten()] for half in (chosen[:, :30], chosen[:, 30:]))
    (expected,) = layer_distances.measure(Colors(), next(halves), {"real": next(halves)})
    real, gray = found["rows"]
    assert real == expected
    assert gray["samples"] == "gray"
    assert gray["Mixed_7c"]["distance"] > real["Mixed_7c"]["distance"]


def test_a_wrong_file(tmp_path, capsys):
    arguments = ["train.npz", "x=digits", "--out", str(tmp_path / "record.json")]
    assert layer_distances.main([str(tmp_path / "none.pth"), *arguments]) == 2
    assert "none.pth is not a file" in capsys.readouterr().err
    assert not (tmp_path / "record.json").exists()


def test_table(tmp_path):
    (tmp_path / "cifar10").mkdir()
    rows = [
        {"samples": name, **{layer: {"means": 0.001, "distance": 0.02} for layer in layer_distances.LAYERS}}
        for name in ("real", "two-encoders")
    ]
    (tmp_path / "cifar10" / "layer-distances.json").write_text(json.dumps({"rows": rows}))
    lines = layer_distances.table(Results(tmp_path)).splitlines()
    assert lines[0] == "| layer | real | two-encoders |"
    assert lines[-1] == "| Mixed_7c | 0.020 (0.0010) | 0.020 (0.0010) |"
