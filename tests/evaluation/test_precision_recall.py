from pathlib import Path

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.evaluation import precision_recall as module
from driftgen.evaluation.neighbors import copied_share, nearest_neighbors
from driftgen.evaluation.precision_recall import manifold_radii, precision_recall

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "08_fid_pr_is.npz")


def golden(case, key):
    return torch.from_numpy(GOLDEN[f"{case}/{key}"])


def random(n, d=5, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


# --- precision and recall -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["pr_a", "pr_b"])
@pytest.mark.parametrize("chunk", [7, 4096])
def test_matches_the_release(case, chunk):
    real, fake = golden(case, "real"), golden(case, "fake")
    found = precision_recall(real, fake, chunk=chunk)
    assert found.precision == float(golden(case, "precision"))
    assert found.recall == float(golden(case, "recall"))
    for rows, key in ((real, "radii_real"), (fake, "radii_fake")):
        torch.testing.assert_close(manifold_radii(rows, chunk=chunk), golden(case, key), rtol=1e-5, atol=1e-5)


def test_the_radius_is_the_distance_to_the_kth_other_sample():
    line = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    assert manifold_radii(line, k=1).tolist() == [1, 1, 4, 16]
    assert manifold_radii(line, k=2).tolist() == [9, 4, 9, 36]


def test_precision_and_recall_swap_with_the_sets():
    real, generated = random(60), 0.7 * random(40, seed=1) + 0.3
    there, back = precision_recall(real, generated), precision_recall(generated, real)
    assert there == (back.recall, back.precision)
    assert there.precision != there.recall


def test_collapse_lowers_only_the_recall():
    real = random(200)
    collapsed = 0.05 * random(100, seed=1)
    found = precision_recall(real, collapsed)
    assert found.precision == 1
    assert found.recall < 0.05
    assert precision_recall(real, real) == (1, 1)
    assert precision_recall(real, real + 100) == (0, 0)


def test_near_samples_far_from_the_origin():
    """Squared distances are differences of large numbers for such samples."""
    real, generated = random(60).double(), random(40, seed=1).double()
    assert precision_recall(real + 1e4, generated + 1e4) == precision_recall(real, generated)


def test_chunks_bound_the_rows_in_memory(monkeypatch):
    sizes = []

    def watched(x, y):
        sizes.append(len(x))
        return squared_distances(x, y)

    squared_distances = module.squared_distances
    monkeypatch.setattr(module, "squared_distances", watched)
    precision_recall(random(50), random(35), chunk=16)
    assert max(sizes) == 16
    assert sum(sizes) == 50 + 35 + 35


def test_images_are_flattened():
    images = random(30, 12).reshape(30, 3, 2, 2)
    assert precision_recall(images, images.flip(0)) == (1, 1)


@pytest.mark.parametrize(
    ("real", "generated", "message"),
    [
        (random(3), random(9), "real has shape [3, 5], expected at least 4 rows"),
        (random(9), random(9)[0], "generated has shape [5], expected at least 4 rows"),
        (random(9), random(9, 4), "real has 5 features, generated 4"),
        (random(9), random(9) / 0, "generated holds NaN or infinite values"),
    ],
)
def test_wrong_sets(real, generated, message):
    with pytest.raises(dg.InputError) as error:
        precision_recall(real, generated)
    assert message in str(error.value)


# --- copies ---------------------------------------------------------------------------------------------


def test_nearest_neighbors():
    training = random(50)
    distances, indices = nearest_neighbors(training[[3, 30]] + torch.tensor([0.01, 0, 0, 0, 0]), training)
    assert indices.tolist() == [3, 30]
    torch.testing.assert_close(distances, torch.full((2,), 0.01, dtype=torch.float64), rtol=1e-4, atol=0)
    x = random(20, seed=1)
    torch.testing.assert_close(
        nearest_neighbors(x, training, chunk=3)[0], torch.cdist(x.double(), training.double()).amin(dim=1)
    )


def test_copies_are_counted_and_fresh_samples_are_not():
    training, heldout, fresh = random(500), random(400, seed=1), random(1000, seed=2)
    assert copied_share(fresh, training, heldout) == pytest.approx(0.05, abs=0.03)
    assert copied_share(training[:100], training, heldout) == 1
    some = torch.cat([fresh[:300], training[:100] + 0.001])
    assert copied_share(some, training, heldout) == pytest.approx(0.25 + 0.75 * 0.05, abs=0.03)
    assert copied_share(fresh, training, heldout, quantile=0.5) == pytest.approx(0.5, abs=0.08)


def test_wrong_neighbors():
    with pytest.raises(dg.InputError, match=r"quantile=1\.5 must be between 0 and 1"):
        copied_share(random(4), random(4), random(4), quantile=1.5)
    with pytest.raises(dg.InputError, match="x has 4 features, training 5"):
        nearest_neighbors(random(4, 4), random(4))
