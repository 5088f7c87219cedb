"""The nearest-neighbor classifier of an encoder's features."""

import pytest
import torch

from driftgen.data.arrays import ArrayImages
from driftgen.data.config import Augment
from driftgen.errors import InputError
from driftgen.evaluation.knn_accuracy import classify, knn_accuracy


def data(pixels, labels, names="ab"):
    return ArrayImages(pixels, torch.tensor(labels), list(names), Augment())


def test_votes_are_weighted_by_similarity():
    similarities = torch.tensor([[0.9, 0.8, 0.8], [0.9, 0.4, 0.3]], dtype=torch.float64)
    labels = torch.tensor([[1, 0, 0], [1, 0, 0]])
    # At a high temperature the majority decides, at a low one the nearest.
    assert classify(similarities, labels, 2, temperature=10.0).tolist() == [0, 0]
    assert classify(similarities, labels, 2, temperature=0.02).tolist() == [1, 1]
    assert classify(similarities, labels, 2, temperature=0.2).tolist() == [0, 1]


def test_two_clusters_and_a_mislabeled_image():
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 8, (60, 3, 4, 4), generator=random, dtype=torch.uint8)
    left = noise.clone()
    left[:, :, :, :2] += 200
    right = noise.clone()
    right[:, :, :, 2:] += 200
    training = data(torch.cat([left[:50], right[:50]]), [0] * 50 + [1] * 50)
    heldout = data(torch.cat([left[50:], right[50:]]), [0] * 10 + [1] * 9 + [0])
    accuracy = knn_accuracy(lambda x: x.flatten(1), training, heldout, k=5)
    assert accuracy == pytest.approx(19 / 20)


def test_wrong_data():
    images = torch.zeros(6, 3, 4, 4, dtype=torch.uint8)
    two, three = data(images, [0, 1] * 3), data(images, [0, 1, 2] * 2, "abc")
    with pytest.raises(InputError, match="held-out images have 3 classes, the training images 2"):
        knn_accuracy(lambda x: x.flatten(1), two, three)
    with pytest.raises(InputError, match="k=20 neighbors, but there are 6 training images"):
        knn_accuracy(lambda x: x.flatten(1), two, two)
