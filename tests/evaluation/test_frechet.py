"""The Fréchet distance against the release's numbers and against closed forms."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torchmetrics.image.fid import FrechetInceptionDistance

from driftgen.errors import InputError
from driftgen.evaluation.frechet import Moments, frechet_distance

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "08_fid_pr_is.npz")


def gaussian(mean, covariance, count=1000):
    """Moments with exactly this mean and covariance."""
    mean, covariance = torch.as_tensor(mean), torch.as_tensor(covariance)
    outer = covariance * (count - 1) + count * torch.outer(mean, mean)
    return Moments(count, mean * count, outer)


@pytest.mark.parametrize("case", ["fid4", "fid16", "fid_rankdef"])
def test_distance_is_the_release_s(case):
    a, b = (gaussian(GOLDEN[f"{case}/mu{i}"], GOLDEN[f"{case}/s{i}"]) for i in (1, 2))
    # The release regularizes covariances of low rank by 1e-6, which moves its result.
    assert frechet_distance(a, b) == pytest.approx(float(GOLDEN[f"{case}/fid"]), rel=2e-6, abs=1e-4)
    assert frechet_distance(b, a) == pytest.approx(frechet_distance(a, b), rel=1e-8)


def test_closed_forms():
    x = torch.randn(500, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    a, shifted, scaled = (Moments.of(y) for y in (x, x + 2, 3 * x))
    assert frechet_distance(a, a) == pytest.approx(0, abs=1e-8)
    assert frechet_distance(a, shifted) == pytest.approx(8 * 4, rel=1e-9)
    # Covariances C and 9 C: tr(C + 9 C − 2 · 3 C) = 4 tr C.
    expected = 4 * a.covariance.trace() + (2 * a.mean).square().sum()
    assert frechet_distance(a, scaled) == pytest.approx(float(expected), rel=1e-9)


def test_distance_is_that_of_torchmetrics():
    g = torch.Generator().manual_seed(2)
    real, generated = torch.randn(90, 6, generator=g), torch.randn(80, 6, generator=g) * 1.3 + 0.2
    network = torch.nn.Identity()
    network.num_features = 6
    metric = FrechetInceptionDistance(network)
    metric.update(real, real=True)
    metric.update(generated, real=False)
    distance = frechet_distance(Moments.of(generated), Moments.of(real))
    assert distance == pytest.approx(float(metric.compute()), rel=1e-5)


def test_moments_add_up_to_those_of_all_samples():
    x = torch.randn(301, 5, generator=torch.Generator().manual_seed(1)) + 100  # mean far above the spread
    parts = [Moments.of(part) for part in x.split(64)]
    total = sum(parts[1:], parts[0])
    assert total.count == 301
    assert torch.allclose(total.mean, x.double().mean(0), rtol=1e-12)
    assert torch.allclose(total.covariance, x.double().T.cov(), rtol=1e-8)


@pytest.mark.parametrize(
    ("features", "other", "text"),
    [
        (torch.zeros(4, 3), torch.zeros(4, 2), "3 and 2 dimensions"),
        (torch.full((4, 3), torch.nan), torch.zeros(4, 3), "NaN"),
        (torch.zeros(1, 3), torch.zeros(4, 3), "at least 2 samples"),
    ],
)
def test_wrong_features_are_one_line(features, other, text):
    with pytest.raises(InputError, match=text):
        frechet_distance(Moments.of(features), Moments.of(other))
