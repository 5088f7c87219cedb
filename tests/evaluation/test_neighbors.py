"""Cosine neighbors over batches, near-copies, and the search over a model's samples."""

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.data.images import digits
from driftgen.evaluation.encoders import load_encoder
from driftgen.evaluation.neighbor_search import search_neighbors
from driftgen.evaluation.neighbors import CosineNeighbors, near_copies
from driftgen.evaluation.real_images import load_bytes, open_in_shape
from driftgen.generators import Noise


def random(n, d=6, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def search(queries, training, k, batch, exclude=None):
    neighbors = CosineNeighbors(queries, k, exclude)
    for rows in training.split(batch):
        neighbors.update(rows)
    return neighbors


# --- the k nearest rows ---------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 7, 100])
@pytest.mark.parametrize("k", [1, 4])
def test_matches_one_pass_over_all_pairs(batch, k):
    queries, training = random(11), random(40, seed=1)
    found = search(queries, training, k, batch)
    x, y = queries.double().numpy(), training.double().numpy()
    cosine = (x @ y.T) / (np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(y, axis=1))
    order = np.argsort(-cosine, axis=1)[:, :k]
    assert found.seen == 40
    assert np.array_equal(found.indices.numpy(), order)
    np.testing.assert_allclose(found.similarities, np.take_along_axis(cosine, order, 1), rtol=1e-12)


def test_the_length_of_a_vector_does_not_matter():
    training = random(20)
    found = search(3.5 * training[[4, 17]], 0.2 * training, 1, 6)
    assert found.indices[:, 0].tolist() == [4, 17]
    torch.testing.assert_close(found.similarities[:, 0], torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize("batch", [1, 6, 20])
def test_an_excluded_row_is_left_out(batch):
    training = random(20)
    exclude = torch.tensor([4, -1, 19])
    found = search(training[[4, 4, 19]], training, 20, batch, exclude)
    assert 4 not in found.indices[0, :19]
    assert 19 not in found.indices[2, :19]
    assert found.indices[1, 0] == 4
    assert found.similarities[0, -1] == -float("inf")  # only 19 rows are left


def test_the_earlier_of_equal_rows_comes_first():
    row = random(1)
    found = search(row, row.repeat(9, 1), 3, 2)
    assert found.indices[0, 0] < 2
    assert found.indices[0].tolist() == sorted(found.indices[0].tolist())


def test_a_vector_of_zeros_is_similar_to_nothing():
    found = search(torch.zeros(1, 6), random(5), 2, 2)
    assert found.similarities.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CosineNeighbors(random(3), 0), "k=0 must be at least 1"),
        (lambda: CosineNeighbors(random(3), 1, torch.zeros(2)), "exclude has shape [2], expected [3]"),
        (lambda: CosineNeighbors(random(3) / 0, 1), "queries holds NaN or infinite values"),
        (lambda: search(random(3), random(5, 4), 1, 5), "queries has 6 features, training 4"),
        (lambda: near_copies(random(3), random(3), 0.0), "quantile=0.0 must be between 0 and 1"),
    ],
)
def test_wrong_rows(call, message):
    with pytest.raises(dg.InputError) as error:
        call()
    assert message in str(error.value)


# --- near-copies ----------------------------------------------------------------------------------------


def test_the_threshold_leaves_the_quantile_of_heldout_images_above_it():
    heldout = torch.arange(100).double() / 100
    copies = near_copies(torch.tensor([0.5, 0.945, 0.96, 1.0]), heldout[torch.randperm(100)])
    assert copies.threshold == 0.94
    assert copies.heldout_share == 0.05
    assert copies.share == 0.75
    assert near_copies(heldout, heldout).share == 0.05


def test_nothing_exceeds_heldout_images_that_are_copies_themselves():
    assert near_copies(torch.ones(4), torch.ones(30)) == (1, 0, 0)


def test_copies_are_counted_and_fresh_samples_are_not():
    training, heldout, fresh = random(500), random(400, seed=1), random(1000, seed=2)
    queries = torch.cat([fresh, training[:200] + 0.001, heldout])
    best = search(queries, training, 1, 64).similarities[:, 0]
    generated, copied, heldout = best[:1000], best[1000:1200], best[1200:]
    assert near_copies(generated, heldout).share == pytest.approx(0.05, abs=0.03)
    assert near_copies(copied, heldout).share == 1


# --- the search -----------------------------------------------------------------------------------------


class Recall(torch.nn.Module):
    """A generator that recalls training digits: the seeded noise chooses one of the class."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.images, self.labels = digits("train")
        self.noise = noise
        self.anchor = torch.nn.Parameter(torch.zeros(()))

    def forward(self, noise, labels, alpha):
        chosen = []
        for gaussian, label in zip(noise.gaussian, labels, strict=True):
            own = (self.labels == label).nonzero()[:, 0]
            chosen.append(self.images[own[int(gaussian.abs().sum() * 1000) % len(own)]])
        return torch.stack(chosen) + self.noise * noise.gaussian

    def sample_noise(self, n, generator=None):
        return Noise(torch.randn(n, 1, 8, 8, generator=generator), torch.zeros(n, 0, dtype=torch.long))


def recall(noise=0.0, batch_size=16):
    return dg.DriftPipeline(Recall(noise), class_names=[str(d) for d in range(10)], batch_size=batch_size)


def pixels():
    return load_encoder("pixels", "cpu")


def test_recalled_training_images_are_found():
    data = open_in_shape("digits", (1, 8, 8))
    found = search_neighbors(recall(), data, pixels(), samples=40, nearest=3)
    assert found.samples.shape == (40, 1, 8, 8)
    assert found.labels[:12] == [*range(10), 0, 1]
    assert found.similarities[:, 0].min() > 0.9999
    own = load_bytes(data, found.indices[:, 0])
    assert (own.int() - found.samples.int()).abs().max() <= 1  # samples are truncated, real images rounded
    assert found.copies.share == 1
    assert found.leave_one_out


def test_heldout_digits_and_left_out_training_digits_agree():
    """Both estimate the similarity of a new digit to the training digits."""
    data, heldout = open_in_shape("digits", (1, 8, 8)), open_in_shape("digits-heldout", (1, 8, 8))
    options = {"samples": 20, "nearest": 1}
    a = search_neighbors(recall(3.0), data, pixels(), heldout=heldout, **options)
    b = search_neighbors(recall(3.0), data, pixels(), **options)
    assert (len(a.heldout), len(b.heldout)) == (360, 1000)
    assert a.heldout.max() < 0.9999
    assert b.heldout.max() < 0.9999
    assert float(a.heldout.mean()) == pytest.approx(float(b.heldout.mean()), abs=0.005)
    assert a.copies.threshold == pytest.approx(b.copies.threshold, abs=0.005)
    assert a.copies.share == 0
    assert torch.equal(a.similarities, b.similarities)


def test_the_batch_size_does_not_matter():
    data = open_in_shape("digits", (1, 8, 8))
    a, b = (
        search_neighbors(recall(0.5, size), data, pixels(), samples=20, nearest=3, seed=4)
        for size in (7, 500)
    )
    torch.testing.assert_close(a.similarities, b.similarities)
    assert torch.equal(a.indices, b.indices)
    assert a.closest(3) == a.similarities[:, 0].topk(3).indices.tolist()


def test_progress_reports_every_phase():
    from contextlib import contextmanager

    phases = []

    @contextmanager
    def progress(title, total, metric):
        steps = []
        yield lambda step, value: steps.append(step)
        phases.append((title, total, steps[-1]))

    data = open_in_shape("digits", (1, 8, 8))
    search_neighbors(recall(), data, pixels(), samples=20, nearest=1, progress=progress)
    assert phases == [
        ("samples", 20, 20),
        ("held-out images", 1000, 1000),
        ("training images", 1437, 1437),
    ]
