"""Fréchet distances in layers of Inception: a set is near its own kind, at every depth."""

import json

import numpy as np
import torch

from driftgen.data.images import digits
from tests.support.inception_weights import pytorch_fid_state
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


def test_command_and_table(tmp_path, capsys):
    images, labels = digits("train")
    pixels = ((images.repeat(1, 3, 1, 1).permute(0, 2, 3, 1).numpy() + 1) * 127.5).round().astype(np.uint8)
    np.savez(tmp_path / "train.npz", images=pixels, labels=labels.numpy())
    torch.save(pytorch_fid_state(), tmp_path / "inception.pth")
    (tmp_path / "cifar10").mkdir()
    record = tmp_path / "cifar10" / "layer-distances.json"
    small = [str(tmp_path / "train.npz"), "--size", "8", "--per-class", "2", "--out", str(record)]
    assert layer_distances.main([str(tmp_path / "none.pth"), "x=digits", *small]) == 2
    assert "none.pth is not a file" in capsys.readouterr().err
    small = [small[0], "gray=digits", *small[1:]]
    # Seeded weights are not those of FID, and the samples are gray.
    assert layer_distances.main([str(tmp_path / "inception.pth"), *small]) == 2
    assert "holds other weights" in capsys.readouterr().err
    rows = [
        {"samples": name, **{layer: {"means": 0.001, "distance": 0.02} for layer in layer_distances.LAYERS}}
        for name in ("real", "two-encoders")
    ]
    record.write_text(json.dumps({"rows": rows}))
    lines = layer_distances.table(Results(tmp_path)).splitlines()
    assert lines[0] == "| layer | real | two-encoders |"
    assert lines[-1] == "| Mixed_7c | 0.020 (0.0010) | 0.020 (0.0010) |"
