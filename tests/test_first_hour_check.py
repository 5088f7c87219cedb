"""The measures of the first hour, on samples whose result is known."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from tools.first_hour_check import (
    CLASSES,
    NEIGHBORS,
    TRAINING,
    PatchEncoder,
    classify,
    mean_distance,
    read_photos,
    write_photos,
)


def stripes(n, across, seed):
    """Random stripes along one axis."""
    lines = np.random.default_rng(seed).integers(0, 256, (n, 32, 1, 3), dtype=np.uint8)
    images = np.broadcast_to(lines, (n, 32, 32, 3))
    return np.ascontiguousarray(images.swapaxes(1, 2) if across else images)


def test_encoder_separates_directions_of_stripes():
    encoder = PatchEncoder.fit(np.concatenate([stripes(40, across, 0) for across in (0, 1)]), rounds=2)
    references = encoder(np.concatenate([stripes(20, across, 1) for across in (0, 1)]))
    labels = torch.tensor([0] * 20 + [1] * 20)
    found = classify(
        encoder(stripes(10, True, 2)) - references.mean(0), references - references.mean(0), labels
    )
    assert (found == 1).all()


def test_neighbors_vote_and_a_row_is_not_its_own_neighbor():
    labels = torch.tensor([0] * NEIGHBORS + [1] * (NEIGHBORS - 1))
    angles = torch.cat([torch.full((NEIGHBORS,), 0.5), torch.zeros(NEIGHBORS - 1)])
    x = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert classify(x[-1:], x, labels).tolist() == [1]  # nine of its own class, one of the other
    assert classify(x, x, labels, own=True)[-1] == 1
    alone = torch.tensor([0] * NEIGHBORS + [1])
    assert classify(x[: NEIGHBORS + 1], x[: NEIGHBORS + 1], alone, own=True)[-1] == 0


def test_mean_distance_is_within_classes():
    x = torch.tensor([[0.0], [2.0], [100.0], [104.0]])
    assert mean_distance(x, torch.tensor([0, 0, 1, 1])) == pytest.approx(3.0)


def test_photos_are_split_without_overlap(tmp_path):
    files, labels = [], []
    for label in range(len(CLASSES)):
        for i in range(TRAINING + 2):
            blob = io.BytesIO()
            Image.new("L", (2, 2), (i * 7 + label) % 256).save(blob, "PNG")
            files.append(np.frombuffer(blob.getvalue(), np.uint8))
            labels.append(label)
    record = {"name": np.array([f"{title}, other name" for title in CLASSES])}
    for split, chosen in (("train", slice(None)), ("val", slice(0, 1))):
        part = files[chosen]
        record[f"{split}_jpeg"] = np.concatenate(part)
        record[f"{split}_off"] = np.cumsum([0, *map(len, part)])
        record[f"{split}_y"] = np.array(labels[chosen])
    np.savez(tmp_path / "source.npz", **record)
    write_photos(tmp_path / "source.npz", tmp_path)
    assert {p.name for p in (tmp_path / "photos").iterdir()} == set(CLASSES.values())
    counts = [len(list((tmp_path / part / "jellyfish").iterdir())) for part in ("photos", "held-out")]
    assert counts == [TRAINING, 3]  # the photo of the validation split comes last
    images, found = read_photos(tmp_path / "held-out", 32)
    assert images.shape == (9, 32, 32, 3)
    assert found.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
