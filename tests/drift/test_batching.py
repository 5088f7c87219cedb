"""Feature sets: chunks, launches, memory, dtypes."""

import math

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.bench.memory import Meter
from tests.support import twin
from tests.support.feature_sets import SHAPES, feature_sets
from tests.support.golden_losses import deviation, results, samples


def test_feature_sets_are_sums_of_single_features():
    gen, pos, neg = feature_sets()
    wn = torch.rand(4, 3)
    loss = dg.DriftingLoss()
    for t in gen.values():
        t.requires_grad_()
    out = loss(gen, pos, neg, negative_weight=wn)
    out.loss.backward()
    assert list(out.drift) == sorted(SHAPES)
    total = 0
    for name, (vectors, width) in SHAPES.items():
        # One feature with each (group, vector) pair as a group has the same statistics.
        one = [t[name].detach().transpose(1, 2).reshape(4 * vectors, -1, width) for t in (gen, pos, neg)]
        one[0].requires_grad_()
        single = loss(*one, negative_weight=wn.repeat_interleave(vectors, 0))
        single.loss.backward()
        torch.testing.assert_close(out.drift[name], single.drift, rtol=1e-5, atol=0)
        torch.testing.assert_close(out.scale[name], single.scale, rtol=1e-6, atol=0)
        gradient = gen[name].grad.transpose(1, 2).reshape(one[0].shape)
        torch.testing.assert_close(gradient, one[0].grad, rtol=1e-4, atol=1e-6)
        total += single.loss
    torch.testing.assert_close(out.loss, total, rtol=1e-5, atol=0)
    torch.testing.assert_close(out.per_group.mean(), out.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("chunk", [1, 3, 5, 1000])
@pytest.mark.parametrize("normalization", ["both", "none", "sinkhorn"])
def test_chunks_change_nothing(chunk, normalization):
    gen, pos, neg = feature_sets()
    wn = torch.rand(4, 3)

    def run(chunk):
        leaves = {k: t.clone().requires_grad_() for k, t in gen.items()}
        out = dg.DriftingLoss(normalization=normalization, chunk=chunk)(leaves, pos, neg, negative_weight=wn)
        out.loss.backward()
        return out.loss, out.per_group, *out.drift.values(), *(t.grad for t in leaves.values())

    for a, b in zip(run(chunk), run(None), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_launches_do_not_grow_with_features_of_one_width():
    def launches(keys):
        gen, pos = ({f"k{i}": samples(2, n, 3, 8, seed=i) for i in range(keys)} for n in (4, 5))
        for t in gen.values():
            t.requires_grad_()
        loss = dg.DriftingLoss()
        with Meter() as forward:
            out = loss(gen, pos)
        leaves = list(gen.values())
        with Meter() as backward:
            torch.autograd.grad(out.loss, leaves)
        return forward.launches, backward.launches

    assert launches(4) == launches(40)


@pytest.mark.slow
def test_memory_stays_flat_and_within_the_documented_bound():
    def peak(vectors, chunk, n=8, p=8, m=4, width=16, seeds=(0, 1, 2)):
        sizes = zip((n, p, m), seeds, strict=True)
        gen, pos, neg = ({"f": samples(4, k, vectors, width, seed=seed)} for k, seed in sizes)
        with Meter() as meter:
            dg.DriftingLoss(chunk=chunk)(gen, pos, neg)
        t = n + p + m
        return meter.peak, 4 * 2 * chunk * (8 * n * t + 6 * n * width + 5 * t * width)

    few, bound = peak(64, chunk=16)
    many, _ = peak(512, chunk=16)
    statistics = 4 * 512 * 8
    assert many <= few + statistics
    for shape in ({}, {"width": 512}, {"n": 64, "p": 64}, {"n": 2, "p": 2, "m": 1, "width": 256}):
        used, bound = peak(128, chunk=16, **shape)
        assert used <= bound + statistics
    used, bound = peak(128, chunk=16, seeds=(0, 0, 0))  # equal samples, computed in float64
    assert bound + statistics < used <= 2 * bound + statistics
    whole, _ = peak(512, chunk=10**6)
    assert whole > 8 * many  # without the bound


def test_bfloat16_features():
    gen, pos, neg = feature_sets(dtype=torch.bfloat16)
    for t in gen.values():
        t.requires_grad_()
    out = dg.DriftingLoss()(gen, pos, neg)
    out.loss.backward()
    wide = [{k: t.detach().float() for k, t in s.items()} for s in (gen, pos, neg)]
    for t in wide[0].values():
        t.requires_grad_()
    reference = dg.DriftingLoss()(*wide)
    reference.loss.backward()
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, reference.loss)
    for k, t in gen.items():
        assert t.grad.dtype == torch.bfloat16
        assert deviation(t.grad.float(), wide[0][k].grad) <= 2**-8


def test_half_precision_gradients_with_a_loss_scaler():
    """Each gradient underflows fp16; with a scaled loss it must be accurate."""
    gen, pos = ({"map": samples(1, n, 64, 256, seed=n, scale=1000).half()} for n in (16, 17))
    gen["map"].requires_grad_()
    out = dg.DriftingLoss()(gen, pos)
    (gradient,) = torch.autograd.grad(out.loss * 2.0**16, gen["map"])
    wide = {"map": gen["map"].detach().float().requires_grad_()}
    (reference,) = torch.autograd.grad(dg.DriftingLoss()(wide, {"map": pos["map"].float()}).loss, wide["map"])
    assert reference.abs().median() < 6e-8
    assert deviation(gradient.float() / 2.0**16, reference) <= 2**-9


@pytest.mark.parametrize(
    "options", [{"normalization": "none"}, {"normalization": "none", "normalize_features": False}]
)
def test_half_precision_gradients_without_drift_normalization(options):
    """V underflows fp16 here; with a scaled loss the gradient must be accurate."""
    gen, pos = samples(16, 4).half().requires_grad_(), samples(16, 4, seed=1).half()
    loss = dg.DriftingLoss((0.05,), normalize_drift=False, **options)
    wide = gen.detach().float().requires_grad_()
    (reference,) = torch.autograd.grad(loss(wide, pos.float()).loss, wide)
    assert 0 < reference.abs().max() < 1e-6
    lift = 2.0 ** math.floor(math.log2(1 / reference.abs().max().item()))
    (gradient,) = torch.autograd.grad(loss(gen, pos).loss * lift, gen)
    assert deviation(gradient.float() / lift, reference) <= 2**-9


def test_no_gradient_means_no_graph():
    gen, pos = samples(6, 3), samples(5, 3)
    assert not dg.DriftingLoss()(gen, pos).loss.requires_grad
    with torch.no_grad():
        assert not dg.DriftingLoss()(gen.requires_grad_(), pos).loss.requires_grad
    pos.requires_grad_()
    dg.DriftingLoss()(gen, pos).loss.backward()
    assert pos.grad is None


def test_group_weights():
    gen, pos, neg = samples(2, 6, 4), samples(2, 5, 4, seed=1), samples(2, 3, 4, seed=2)
    loss = dg.DriftingLoss()
    short = results(loss, gen, pos, neg, negative_weight=torch.tensor([0.5, 2.0]))
    full = results(loss, gen, pos, neg, negative_weight=torch.tensor([[0.5] * 3, [2.0] * 3]))
    for a, b in zip(short, full, strict=True):
        assert (a == b).all()
    weights = {"generated_weight": torch.rand(2, 6), "positive_weight": torch.rand(2, 5)}
    got = results(loss, gen, pos, neg, **weights)
    wg, wp = (w.double().numpy() for w in weights.values())
    want = twin.release_loss(gen, pos, neg, loss.temperatures, wg, np.ones((2, 3)), wp)
    for a, b in zip(got, want, strict=True):
        assert deviation(a, b) <= 1e-5


def test_wrong_feature_sets():
    gen, pos, neg = feature_sets()
    with pytest.raises(ValueError, match=r"positives\['a'\] is on meta, but generated is on cpu"):
        dg.DriftingLoss()(gen, {k: t.to("meta") for k, t in pos.items()}, neg)
    with pytest.raises(ValueError, match="do not have the same features: a"):
        dg.DriftingLoss()(gen, {k: v for k, v in pos.items() if k != "a"}, neg)
    with pytest.raises(ValueError, match=r"positives\['b'\] has 4 samples, expected 5"):
        dg.DriftingLoss()(gen, pos | {"b": pos["b"][:, 1:]}, neg)
    with pytest.raises(ValueError, match=r"negatives\['c'\] must have shape"):
        dg.DriftingLoss()(gen, pos, neg | {"c": neg["c"][0]})
    with pytest.raises(ValueError, match="non-empty dict"):
        dg.DriftingLoss()({}, {})
    with pytest.raises(ValueError, match="feature names must be strings"):
        dg.DriftingLoss()({1: gen["a"]}, {1: pos["a"]})
