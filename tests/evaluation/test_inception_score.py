"""The Inception score against the release's number, in one piece and in parts."""

from pathlib import Path

import numpy as np
import pytest
import torch

from driftgen.errors import InputError
from driftgen.evaluation.inception_score import ScoreSums, split_of_images

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "08_fid_pr_is.npz")
LOGITS = torch.from_numpy(GOLDEN["is/logits"])


@pytest.mark.parametrize("batch", [7, 237])
def test_score_is_the_release_s(batch):
    sums = ScoreSums(len(LOGITS))
    for indices in torch.randperm(len(LOGITS), generator=torch.Generator().manual_seed(0)).split(batch):
        sums.update(LOGITS[indices], indices)
    score = sums.compute()
    assert score.mean == pytest.approx(float(GOLDEN["is/mean"]), rel=1e-6)
    assert score.std == pytest.approx(float(GOLDEN["is/std"]), rel=1e-5)


def test_closed_forms():
    uniform, sums = torch.zeros(100, 5), ScoreSums(100)
    sums.update(uniform, torch.arange(100))
    assert sums.compute().mean == pytest.approx(1)
    certain = ScoreSums(10, splits=1)
    certain.update(1e4 * torch.eye(10), torch.arange(10))
    assert certain.compute().mean == pytest.approx(10)


def test_splits_are_equal_and_drop_the_remainder():
    split = split_of_images(237)
    assert torch.bincount(split + 1).tolist() == [7] + [23] * 10


def test_few_images_are_one_line():
    with pytest.raises(InputError, match="at least 10 images"):
        ScoreSums(9)
