import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import driftgen as dg
from tests.support import twin
from tests.support.golden_losses import CASES, GOLDEN, deviation, exact, golden_inputs, results, samples

# --- the released code ----------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [k for k in CASES if k not in ("c09", "c15")])
def test_release_goldens(key):
    gen, pos, neg, wn = golden_inputs(key)
    loss = dg.DriftingLoss(CASES[key]["R_list"], convention="release")
    got = results(loss, gen, pos, neg, negative_weight=wn)
    own_error = CASES[key]["rel_dev_float32_vs_exact_float64"]
    for value, name in zip(got, ("loss", "scale", "lossR", "grad"), strict=True):
        # 1e-5, or the error of the golden itself (its gradient in bf16 is also rounded).
        tolerance = max(1e-5, 1.1 * own_error[name])
        if (key, name) == ("c17", "grad"):
            tolerance = 2**-7
        assert deviation(value, GOLDEN[f"{key}_{name}"]) <= tolerance, name


@pytest.mark.parametrize("key", CASES)
def test_release_goldens_in_exact_arithmetic(key):
    """Within 1e-5 of float64 everywhere, also for c09 (identical samples) and c15 (offset)."""
    gen, pos, neg, wn = golden_inputs(key)
    loss = dg.DriftingLoss(CASES[key]["R_list"])
    got = results(loss, gen, pos, neg, negative_weight=wn)
    want = exact(twin.release_loss, gen, pos, neg, CASES[key]["R_list"], wn)
    for value, exact_value, name in zip(got, want, ("loss", "scale", "drift", "gradient"), strict=True):
        tolerance = 2**-8 if (key, name) == ("c17", "gradient") else 1e-5
        assert deviation(value, exact_value) <= tolerance, name
    if key == "c09":
        assert (got[0] == 0).all()
        assert (got[3] == 0).all()


def test_release_mask_is_not_complete():
    """100 on the normalized distance does not mask if the temperature is of that order."""
    gen, pos = samples(2, 6, 4), samples(2, 5, 4, seed=1)
    got = results(dg.DriftingLoss((50.0,)), gen, pos)
    for value, exact_value in zip(got, exact(twin.release_loss, gen, pos, None, (50.0,)), strict=True):
        assert deviation(value, exact_value) <= 1e-5


# --- the paper ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", ["both", "y", "none"])
@pytest.mark.parametrize("kernel", ["laplace", "gaussian", "inverse_multiquadric"])
@pytest.mark.parametrize("temperatures", [(0.3,), (0.05, 0.2, 1.0)])
def test_paper_convention(normalization, kernel, temperatures):
    gen, pos, neg = samples(3, 6, 4), samples(3, 5, 4, seed=1), samples(3, 2, 4, seed=2)
    wn = torch.rand(3, 2)
    loss = dg.DriftingLoss(temperatures, kernel, normalization, convention="paper")
    got = results(loss, gen, pos, neg, negative_weight=wn)
    want = exact(twin.paper_loss, gen, pos, neg, temperatures, wn, kernel=kernel, normalization=normalization)
    for value, exact_value in zip(got, want, strict=True):
        assert deviation(value, exact_value) <= 2e-5


@pytest.mark.parametrize("normalization", ["both", "y", "none", "sinkhorn"])
def test_paper_weights_count_copies(normalization):
    gen, pos, neg = samples(2, 6, 4), samples(2, 5, 4, seed=1), samples(2, 2, 4, seed=2)
    loss = dg.DriftingLoss(convention="paper", normalization=normalization)
    weighted = results(loss, gen, pos, neg, negative_weight=torch.tensor([[3.0, 0.0], [1.0, 2.0]]))
    copies = torch.stack([neg[0, [0, 0, 0]], neg[1, [0, 1, 1]]])
    for a, b in zip(weighted, results(loss, gen, pos, copies), strict=True):
        assert deviation(a, b) <= 1e-5


@pytest.mark.parametrize("normalization", ["both", "y", "none", "sinkhorn"])
def test_nothing_with_weight_means_no_drift(normalization):
    """A sample does not move if no other sample has weight."""
    loss = dg.DriftingLoss(convention="paper", normalization=normalization)
    alone = loss(samples(1, 3), samples(5, 3, seed=1), positive_weight=torch.zeros(1, 5))
    assert alone.loss == 0
    one_hot = torch.eye(4)[:1]
    out = loss(samples(4, 3), samples(5, 3, seed=1), positive_weight=torch.zeros(5), generated_weight=one_hot)
    assert out.loss.isfinite()


def test_release_guards_apply_to_the_laplace_kernel_only():
    """100 on the distance does not mask a heavy tail: other kernels use the paper's mask."""
    gen, pos = samples(2, 6, 4), samples(2, 5, 4, seed=1)
    for kernel in ("gaussian", "inverse_multiquadric"):
        a, b = (results(dg.DriftingLoss(kernel=kernel, convention=c), gen, pos) for c in ("release", "paper"))
        for x, y in zip(a, b, strict=True):
            assert (x == y).all()


def test_paper_sums_vectors_and_release_averages_them():
    gen, pos = {"map": samples(2, 6, 5, 4)}, {"map": samples(2, 7, 5, 4, seed=1)}
    release = dg.DriftingLoss((0.2,))(gen, pos)
    paper = dg.DriftingLoss((0.2,), convention="paper")(gen, pos)
    assert release.loss.item() == pytest.approx(1, rel=1e-5)  # one temperature, normalized to 1
    assert paper.loss.item() == pytest.approx(5, rel=1e-5)


@pytest.mark.parametrize("convention", ["release", "paper"])
def test_plain_loss_is_algorithm_1(convention):
    gen, pos = samples(6, 3).requires_grad_(), samples(5, 3, seed=1)
    plain = dg.DriftingLoss(0.5, normalize_features=False, normalize_drift=False, convention=convention)
    out = plain(gen, pos)
    v = dg.drift_field(gen, pos, temperature=0.5)
    torch.testing.assert_close(out.loss, v.square().mean())
    torch.testing.assert_close(out.drift, v.square().mean()[None])
    (gradient,) = torch.autograd.grad(out.loss, gen)
    (expected,) = torch.autograd.grad((gen - (gen + v).detach()).square().mean(), gen)
    torch.testing.assert_close(gradient, expected)


# --- properties -----------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2**-3, 2**3, 2**13]), st.sampled_from(["release", "paper"]), st.integers(0, 2**31))
def test_feature_scale_does_not_matter(scale, convention, seed):
    """Powers of two are exact. The release clamps distances to 1e-4, whatever the scale."""
    gen, pos = samples(2, 6, 4, seed=seed), samples(2, 5, 4, seed=seed + 1)
    loss = dg.DriftingLoss(convention=convention)
    a, b = results(loss, gen, pos), results(loss, gen * scale, pos * scale)
    allowed = 2e-4 if convention == "release" else 0
    assert deviation(b[0], a[0]) <= allowed
    assert deviation(b[1], a[1] * scale) <= allowed
    assert deviation(b[2], a[2]) <= allowed
    assert deviation(b[3] * scale, a[3]) <= allowed


def test_normalized_loss_is_flat_and_drift_is_not():
    pos = samples(1, 64, 2)
    near, far = samples(1, 64, 2, seed=1), samples(1, 64, 2, seed=1) + 3
    loss = dg.DriftingLoss((0.2,))
    a, b = loss(near, pos), loss(far, pos)
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-4)
    assert b.drift > 10 * a.drift


@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize("normalization", ["both", "y", "none", "sinkhorn"])
def test_hard_inputs_stay_finite(convention, normalization):
    base = samples(2, 6, 4)
    for gen, pos in [
        (torch.zeros(2, 6, 4), torch.zeros(2, 5, 4)),
        (base[:, :1], base[:, 1:2]),
        (base + 1000, base[:, :5] + 1000.01),
        (base * 1e-40, base[:, 1:] * 1e-40),
        (base.index_fill(1, torch.tensor([2]), 1e6), base[:, 1:]),
    ]:
        got = results(dg.DriftingLoss(convention=convention, normalization=normalization), gen, pos)
        assert all(np.isfinite(v).all() for v in got)


@pytest.mark.parametrize("size", [1e-40, 1e-3, 1e30])
def test_paper_convention_at_any_size(size):
    """The paper has no guards: denormal features are normalized like all others."""
    gen, pos = samples(2, 6, 4), samples(2, 5, 4, seed=1)
    loss = dg.DriftingLoss(convention="paper")
    got, want = results(loss, gen * size, pos * size), results(loss, gen, pos)
    assert deviation(got[0], want[0]) <= (1e-2 if size < 1e-38 else 1e-5)
    assert deviation(got[2], want[2]) <= (1e-2 if size < 1e-38 else 1e-5)


@pytest.mark.parametrize(("normalize_drift", "size"), [(True, 1e20), (False, 1e18)])
def test_raw_features_of_any_size(normalize_drift, size):
    """Squares of 1e20 overflow float32; with normalized drifts, no result does."""
    gen, pos = samples(6, 3), samples(5, 3, seed=1)
    options = {"normalize_features": False, "normalize_drift": normalize_drift}
    small, large = (dg.DriftingLoss(0.5 * s, **options)(gen * s, pos * s) for s in (1.0, size))
    want = small.loss.item() * (1 if normalize_drift else size**2)
    assert large.loss.item() == pytest.approx(want, rel=1e-4)
    assert large.per_group.item() == pytest.approx(want, rel=1e-4)


def test_none_normalization_at_low_temperatures():
    """k·k underflows float32 at the paper's lowest temperature; the normalized drift must not."""
    gen, pos = samples(2, 6, 64), samples(2, 5, 64, seed=1)
    got = results(dg.DriftingLoss((0.02,), normalization="none"), gen, pos)
    want = exact(twin.paper_loss, gen, pos, None, (0.02,), normalization="none")
    assert deviation(got[0], want[0]) <= 1e-4
    assert deviation(got[3], want[3]) <= 1e-4


@pytest.mark.parametrize("temperatures", [(0.02,), (0.02, 0.05, 0.2), (1e-4,)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "normalization"),
    [("laplace", "both"), ("laplace", "y"), ("laplace", "none"), ("gaussian", "both")],
)
def test_drifts_far_below_float32(kernel, normalization, temperatures):
    """Affinities of positives are at most e⁻⁹¹ here, and e^-10000 at the lowest temperature."""
    gen, pos = samples(1, 64, 64), samples(1, 16, 64, seed=1) + 20
    loss = dg.DriftingLoss(temperatures, kernel, normalization, convention="paper")
    got = results(loss, gen, pos)
    want = exact(twin.paper_loss, gen, pos, None, temperatures, kernel=kernel, normalization=normalization)
    assert want[0] > 0.99
    for value, exact_value in zip(got, want, strict=True):
        assert deviation(value, exact_value) <= 2e-5


@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize("gap", [1e3, 1e5, 1e7])
def test_distant_clusters(gap, convention):
    """The gradient of every sample, also in the cluster that is far from the medoid."""
    gen, pos = samples(1, 20, 5), samples(1, 16, 5, seed=1)
    gen[:, 10:] += gap
    pos[:, 8:] += gap
    for dtype in (torch.float32, torch.float64):
        got = results(dg.DriftingLoss(convention=convention), gen.to(dtype), pos.to(dtype))[3][0]
        function = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
        want = exact(function, gen, pos, None, (0.02, 0.05, 0.2))[3][0]
        assert (np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max() <= 1e-6


# --- wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatures": ()}, "temperatures is empty"),
        ({"temperatures": (0.1, -0.2)}, "temperatures=-0.2 must be a positive number"),
        ({"kernel": "gauss"}, "kernel='gauss' is not known: did you mean 'gaussian'"),
        ({"normalization": "x"}, "normalization='x' is not known"),
        ({"convention": "papers"}, "did you mean 'paper'"),
        ({"chunk": 0}, "chunk=0 must be a positive integer"),
        ({"chunk": 1.5}, "chunk=1.5 must be a positive integer"),
        ({"temperatures": None}, "temperatures=None must be a positive number"),
        ({"temperatures": "warm"}, "temperatures='w' must be a positive number"),
        ({"attraction": math.inf}, "attraction=inf must be a number from -1e6 to 1e6"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=r".") as error:
        dg.DriftingLoss(**options)
    assert message in str(error.value)


def test_temperatures_of_any_type():
    want = dg.DriftingLoss((0.5,)).temperatures
    for given_as in (0.5, np.float32(0.5), [0.5], np.array([0.5]), torch.tensor(0.5), (t for t in [0.5])):
        assert dg.DriftingLoss(given_as).temperatures == want


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positives": None}, "positives must be a tensor or a non-empty dict"),
        ({"positives": torch.zeros(2, 0, 4)}, "positives is empty"),
        ({"positives": torch.zeros(2, 5, 3)}, "positives has 3 elements per vector (the width), expected 4"),
        ({"positives": torch.zeros(3, 5, 4)}, "positives has 3 groups, expected 2"),
        ({"positives": {"f": torch.zeros(2, 5, 1, 4)}}, "positives must have the same type as generated"),
        ({"positives": torch.full((2, 5, 4), math.nan)}, "positives contains NaN or infinite values"),
        ({"generated": torch.full((2, 6, 4), math.inf)}, "generated contains NaN or infinite values"),
        ({"generated": torch.zeros(4)}, "generated must be a tensor [N, D] or [G, N, D]"),
        ({"generated": [1.0]}, "generated must be a tensor or a non-empty dict"),
        ({"negative_weight": torch.ones(2)}, "negative_weight is given, but there are no samples for it"),
        ({"positive_weight": torch.ones(5)}, "positive_weight has shape [5], expected [2] or [2, 5]"),
        ({"positive_weight": -torch.ones(2)}, "positive_weight must be between 0 and 1e8"),
    ],
)
def test_wrong_samples(change, message):
    arguments = {"generated": samples(2, 6, 4), "positives": samples(2, 5, 4)} | change
    generated, positives = arguments.pop("generated"), arguments.pop("positives")
    with pytest.raises(ValueError, match=r".") as error:
        dg.DriftingLoss()(generated, positives, **arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_samples_without_weight_may_be_the_nearest():
    """Unconditional negatives without guidance have no effect, however near they are."""
    x, positives = torch.randn(2, 6, 10), torch.randn(2, 5, 10)
    loss = dg.DriftingLoss(convention="paper", normalization="y", temperatures=(0.003,))
    alone = loss(x, positives)
    out = loss(x, positives, x[:, :3] + 1e-3, negative_weight=torch.zeros(2))
    assert out.loss.isfinite()
    torch.testing.assert_close(out.scale, alone.scale)
    torch.testing.assert_close(out.drift, alone.drift)


def test_autocast_changes_nothing():
    gen, pos, neg, _ = golden_inputs("c00")
    gen.requires_grad_()
    results_by_mode = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = dg.DriftingLoss()(gen, pos, neg)
        results_by_mode.append([out.loss, out.per_group, *torch.autograd.grad(out.loss, gen)])
    assert all(torch.equal(a, b) for a, b in zip(*results_by_mode, strict=True))


def test_a_process_group_is_one():
    with pytest.raises(dg.InputError, match=r"process_group=5 must be a torch.distributed.ProcessGroup"):
        dg.DriftingLoss(process_group=5)
