import pytest
import torch

import driftgen as dg
from driftgen.evaluation import density_coverage as module
from driftgen.evaluation.density_coverage import density_coverage
from driftgen.evaluation.precision_recall import precision_recall


def random(n, d=5, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_force(real, generated, k):
    """The definition, pair by pair."""
    inside = torch.zeros(len(real), len(generated))
    for i, x in enumerate(real):
        others = torch.cat([real[:i], real[i + 1 :]])
        radius = sorted(float((x - other).norm()) for other in others)[k - 1]
        for j, y in enumerate(generated):
            inside[i, j] = float((x - y).norm()) < radius
    return float(inside.sum() / (k * len(generated))), float(inside.any(dim=1).double().mean())


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_matches_the_definition(k, chunk):
    real, generated = random(40), 0.8 * random(25, seed=1) + 0.2
    density, coverage = density_coverage(real, generated, k, chunk)
    assert (density, coverage) == pytest.approx(brute_force(real, generated, k), rel=1e-6)
    assert 0 < coverage < 1


def test_points_on_a_line():
    """Balls of radius 1, 1, 2 and 4 around 0, 1, 3 and 7 for k = 1."""
    real = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert density_coverage(real, torch.tensor([[0.5]]), k=1) == (2, 0.5)
    assert density_coverage(real, torch.tensor([[0.5], [9.0]]), k=1) == (1.5, 0.75)
    assert density_coverage(real, torch.tensor([[11.0]]), k=1) == (0, 0)  # on the edge of the last ball


def test_a_set_against_itself():
    real = random(300, 16)
    for k in (1, 5):
        assert density_coverage(real, real, k) == (1, 1)
        assert density_coverage(real, real, k, chunk=64) == (1, 1)


def test_far_away_is_nothing():
    assert density_coverage(random(50), random(30, seed=1) + 100) == (0, 0)


def test_samples_in_the_middle_have_a_density_above_1_and_little_coverage():
    density, coverage = density_coverage(random(400), 0.05 * random(200, seed=1))
    assert density > 1.1
    assert coverage < 0.2


def test_fresh_samples_of_the_same_distribution():
    """Expected values: density 1, coverage 1 - 2^-k for sets of equal size."""
    density, coverage = density_coverage(random(2000, 3), random(2000, 3, seed=1), k=3)
    assert density == pytest.approx(1, abs=0.06)
    assert coverage == pytest.approx(1 - 2**-3, abs=0.02)


def test_an_outlier_raises_the_precision_but_hardly_the_density():
    real, poor = random(200), random(100, seed=1) + 6
    outlier = torch.full((1, 5), 8.0, dtype=torch.float64)
    real = torch.cat([real, outlier])
    assert precision_recall(real, poor).precision > 0.9
    assert density_coverage(real, poor).density < 0.25


def test_the_order_does_not_matter():
    real, generated = random(60), 0.7 * random(40, seed=1)
    shuffled = real[torch.randperm(60)], generated[torch.randperm(40)]
    assert density_coverage(*shuffled, chunk=11) == density_coverage(real, generated)


def test_dtypes_mix_and_images_are_flattened():
    images = random(30, 12).reshape(30, 3, 2, 2)
    expected = density_coverage(images.float().double(), images.flip(1).float().double())
    assert density_coverage(images.float(), images.flip(1).float().double()) == expected


def test_chunks_bound_the_rows_in_memory(monkeypatch):
    sizes = []
    squared_distances = module.squared_distances

    def watched(x, y):
        sizes.append(len(x))
        return squared_distances(x, y)

    monkeypatch.setattr(module, "squared_distances", watched)
    density_coverage(random(50), random(35), chunk=16)
    assert sizes == [16, 16, 16, 2]


@pytest.mark.cuda
def test_ten_thousand_inception_features_take_seconds():
    real, generated = (torch.randn(10_000, 2048, device="cuda") for _ in range(2))
    density_coverage(real[:100], generated[:100])
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    density_coverage(real, generated)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 10_000


@pytest.mark.parametrize(
    ("real", "generated", "k", "message"),
    [
        (random(5), random(9), 5, "real has shape [5, 5], expected at least 6 rows"),
        (random(9), random(0), 5, "generated has shape [0, 5], expected at least 1 row of"),
        (random(9), random(9, 4), 5, "real has 5 features, generated 4"),
        (random(9) / 0, random(9), 5, "real holds NaN or infinite values"),
        (random(9), random(9), 0, "k=0 must be at least 1"),
    ],
)
def test_wrong_sets(real, generated, k, message):
    with pytest.raises(dg.InputError) as error:
        density_coverage(real, generated, k)
    assert message in str(error.value)
