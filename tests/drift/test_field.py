import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import driftgen as dg
from driftgen.drift.field import pairwise_distance
from driftgen.drift.kernels import KERNELS
from driftgen.drift.normalization import NORMALIZATIONS, sinkhorn
from tests.support import twin
from tests.support.helpers import fails

PLAIN = [n for n in NORMALIZATIONS if n != "sinkhorn"]


def samples(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def close(got, want, tolerance=1e-5):
    """Largest deviation relative to the largest value."""
    want = torch.as_tensor(want, dtype=torch.float64)
    assert got.isfinite().all()
    worst = (got.double() - want).abs().max().item()
    assert worst <= tolerance * max(want.abs().max().item(), 1e-30), worst / want.abs().max().item()


@st.composite
def problems(draw, same_size=False):
    """Sizes, seed and temperature of a random problem."""
    n, p, m = (draw(st.integers(1, 7)) for _ in range(3))
    width = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**31))
    temperature = draw(st.sampled_from([0.3, 1.0, 4.0]))
    x, pos, neg = (samples(k, width, seed=seed + i) for i, k in enumerate((n, p, p if same_size else m)))
    return x, pos, neg, temperature


names = st.tuples(st.sampled_from(sorted(KERNELS)), st.sampled_from(sorted(NORMALIZATIONS)))


# --- against the float64 twin ---------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalization", PLAIN)
@pytest.mark.parametrize("own", [True, False])
def test_agrees_with_the_twin(kernel, normalization, own):
    x, pos, neg = samples(6, 3), samples(5, 3, seed=1), None if own else samples(4, 3, seed=2)
    wp, wn = torch.rand(5), torch.rand(6 if own else 4)
    options = {"temperature": 0.7, "kernel": kernel, "normalization": normalization}
    options |= {"attraction": 1.5, "repulsion": 0.5}
    got = dg.drift_field(x, pos, neg, positive_weight=wp, negative_weight=wn, **options)
    close(got, twin.field(x, pos, neg, wp=wp, wn=wn, **options))


@settings(max_examples=60, deadline=None)
@given(problems(), names, st.integers(0, 2**31))
def test_weights_act_after_both_softmaxes(problem, names, seed):
    x, pos, neg, temperature = problem
    kernel, normalization = names
    if normalization == "sinkhorn":
        normalization = "both"
    generator = torch.Generator().manual_seed(seed)
    wp, wn = (torch.rand(len(t), generator=generator).round(decimals=1) for t in (pos, neg))
    options = {"temperature": temperature, "kernel": kernel, "normalization": normalization}
    got = dg.drift_field(x, pos, neg, positive_weight=wp, negative_weight=wn, **options)
    want = twin.field(x, pos, neg, wp=wp, wn=wn, **options)
    torch.testing.assert_close(got.double(), torch.tensor(want), rtol=1e-4, atol=1e-6)


# --- properties -----------------------------------------------------------------------------------------


def rounding(pos, neg):
    """Bound on the rounding error of a field: without normalization it sums one term per pair."""
    return 1e-6 * max(10, len(pos) * len(neg))


@settings(max_examples=60, deadline=None)
@given(problems(), names)
def test_swapping_positives_and_negatives_flips_the_field(problem, names):
    x, pos, neg, temperature = problem
    options = {"temperature": temperature, "kernel": names[0], "normalization": names[1]}
    v, flipped = dg.drift_field(x, pos, neg, **options), dg.drift_field(x, neg, pos, **options)
    torch.testing.assert_close(v, -flipped, rtol=1e-4, atol=rounding(pos, neg))


@settings(max_examples=60, deadline=None)
@given(problems(), names)
def test_no_drift_at_equilibrium(problem, names):
    x, pos, _, temperature = problem
    v = dg.drift_field(x, pos, pos.clone(), temperature=temperature, kernel=names[0], normalization=names[1])
    assert v.abs().max() <= rounding(pos, pos)


@settings(max_examples=60, deadline=None)
@given(problems(), names, st.integers(0, 2**31))
def test_equivariance(problem, names, seed):
    """Permuting and rotating samples permutes and rotates the field; translating them does not change it."""
    x, pos, neg, temperature = problem
    generator = torch.Generator().manual_seed(seed)
    width = x.shape[-1]
    turn = torch.linalg.qr(torch.randn(width, width, generator=generator, dtype=torch.float64)).Q.float()
    shift = torch.randn(width, generator=generator)
    order = torch.randperm(len(x), generator=generator)
    options = {"temperature": temperature, "kernel": names[0], "normalization": names[1]}
    v = dg.drift_field(x, pos, neg, **options)
    moved = dg.drift_field(*(t @ turn.T + shift for t in (x[order], pos, neg)), **options)
    torch.testing.assert_close(moved, v[order] @ turn.T, rtol=1e-3, atol=1e-4)
    own = dg.drift_field(x, pos, **options)
    torch.testing.assert_close(dg.drift_field(x[order], pos, **options), own[order], rtol=1e-3, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(problems(), names)
def test_a_sample_of_weight_zero_does_not_pull(problem, names):
    """A sample of weight 0 counts in the denominators, but does not attract."""
    x, pos, neg, temperature = problem
    width, temperature = x.shape[-1], max(temperature, 1.0)  # so that no kernel underflows
    # The last positive is off the plane of the others: without its weight, V must stay in the plane.
    x, pos, neg = (torch.nn.functional.pad(t, (0, 1)) for t in (x, torch.cat([pos, pos[-1:]]), neg))
    pos[-1, -1] = 2.0
    options = {"temperature": temperature, "kernel": names[0], "normalization": names[1]}
    weight = torch.ones(len(pos))
    assert dg.drift_field(x, pos, neg, positive_weight=weight, **options)[:, width].abs().max() > 0
    weight[-1] = 0
    assert (dg.drift_field(x, pos, neg, positive_weight=weight, **options)[:, width] == 0).all()


def test_attraction_and_repulsion_are_factors_of_their_halves():
    x, pos = samples(6, 3), samples(5, 3, seed=1)

    def v(a, r): return dg.drift_field(x, pos, temperature=0.5, attraction=a, repulsion=r)  # fmt: skip

    torch.testing.assert_close(v(1.5, 2.0), 1.5 * v(1, 0) + 2 * v(0, 1))
    assert v(1, 0).norm() > 0


# --- hard inputs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalization", PLAIN)
def test_common_offset(normalization):
    base = [samples(k, 4, seed=k, scale=0.01) for k in (6, 5)]
    x, pos = (t + 1000 for t in base)
    got = dg.drift_field(x, pos, temperature=0.01, normalization=normalization)
    close(got, twin.field(x, pos, temperature=0.01, normalization=normalization))
    # Differences of float64 input are taken in float64: the offset costs no digits.
    x, pos = (t.double() + 1000 for t in base)
    got = dg.drift_field(x, pos, temperature=0.01, normalization=normalization)
    close(got, twin.field(*base, temperature=0.01, normalization=normalization))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_degenerate_inputs_stay_finite(kernel, normalization):
    options = {"kernel": kernel, "normalization": normalization}
    same = torch.full((5, 3), 0.7)
    assert (dg.drift_field(same, same, temperature=0.1, **options) == 0).all()
    one = samples(1, 3)
    assert (dg.drift_field(one, samples(4, 3), temperature=0.1, **options) == 0).all()
    assert dg.drift_field(one, one + 1, one - 1, temperature=1.0, **options).isfinite().all()
    for size, temperature in ((1e-40, 0.1), (1e30, 0.1), (1.0, 1e-30), (1.0, 1e30)):
        x, pos, neg = (samples(n, 3) * size for n in (5, 4, 3))
        for negatives in (None, neg):
            given = {"negatives": negatives, "temperature": temperature, **options}
            if kernel == "gaussian" and size / temperature > 1e18:  # its logits have twice the exponent
                fails(lambda x=x, pos=pos, given=given: dg.drift_field(x, pos, **given), "is too low for")
            else:
                assert dg.drift_field(x, pos, **given).isfinite().all()


@pytest.mark.parametrize("normalization", PLAIN)
@pytest.mark.parametrize("outlier", [0, 2, 5])
def test_far_outlier(normalization, outlier):
    x, pos = samples(6, 3), samples(5, 3, seed=1)
    x[outlier] = 1e6
    got = dg.drift_field(x, pos, temperature=0.5, normalization=normalization)
    want = twin.field(x, pos, temperature=0.5, normalization=normalization)
    near = [i for i in range(6) if i != outlier]
    close(got[near], want[near])
    assert got[outlier].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [30, 60, 120, 250, 1e3, 1e5, 1e7])
def test_distant_clusters(gap, dtype):
    """One origin for all samples would cost the other cluster gap · 2⁻²⁴ of its spread."""
    x, pos = samples(20, 5).to(dtype), samples(16, 5, seed=1).to(dtype)
    x[10:] += gap
    pos[8:] += gap
    got, want = dg.drift_field(x, pos, temperature=1.0), twin.field(x, pos, temperature=1.0)
    error = np.linalg.norm(got.numpy() - want, axis=1) / np.linalg.norm(want, axis=1)
    assert error.max() <= (1e-6 if gap >= 1e3 else 1e-5)


def test_low_temperatures():
    """At logits near 1e5, a relative error of 6e-8 of a distance is an error of 6e-3 of an affinity."""
    x, pos, neg = samples(5, 3), samples(4, 3, seed=1), samples(4, 3, seed=2)
    pos[:] = neg + 1e-5 * samples(4, 3, seed=3)  # equally near, so that V does not underflow
    got, want = (field(x, pos, neg, temperature=1e-5) for field in (dg.drift_field, twin.field))
    assert np.abs(want).max() > 1e-10
    close(got, want, 1e-5)


def test_a_field_beyond_float32_is_an_error():
    x, pos = samples(6, 3).double(), samples(5, 3, seed=1).double()
    for field in (dg.drift_field, dg.mmd_field):
        assert field(x * 1e30, pos * 1e30, temperature=1e30).isfinite().all()
    large = {"x": x * 1e150, "positives": pos * 1e150, "negatives": pos * 1e150, "temperature": 1e30}
    fails(
        lambda: dg.drift_field(**large, kernel="inverse_multiquadric"),
        "^the field exceeds the range of float32",
    )
    fails(lambda: dg.drift_field(**large), r"^temperature=1e\+30 is too low for samples that are ")


def test_denormals_keep_their_distances():
    x = samples(6, 3).double()
    got = pairwise_distance((x * 1e-40).float(), (x * 1e-40).float()).double() * 1e40
    torch.testing.assert_close(got, torch.cdist(x, x), rtol=1e-3, atol=1e-4)
    got = dg.drift_field((x * 1e-40).float(), (x.flip(0) * 2e-40).float(), temperature=1.0).double() * 1e40
    want = twin.field(x * 1e-40, x.flip(0) * 2e-40, temperature=1.0) * 1e40
    torch.testing.assert_close(got, torch.tensor(want), rtol=1e-3, atol=1e-4)


def test_underflowing_kernels_keep_their_direction():
    """Without normalization k·k is about 1e-87 here, which underflows float32."""
    x, pos, neg = samples(4, 3), samples(5, 3, seed=1), samples(5, 3, seed=2)
    got = dg.drift_field(x, pos, neg, temperature=0.25, normalization="none")
    close(got, twin.field(x, pos, neg, temperature=0.25, normalization="none"), 1e-4)
    assert (dg.drift_field(x + 100, pos, neg, temperature=0.25, normalization="none") == 0).all()


# --- types, shapes, gradient ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_types(dtype):
    x, pos = samples(6, 3).to(dtype), samples(5, 3, seed=1).to(dtype)
    v = dg.drift_field(x, pos, temperature=0.5)
    assert v.dtype == torch.float32
    close(v, twin.field(x.double(), pos.double(), temperature=0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(dg.drift_field(x, pos, temperature=0.5), v)


def test_leading_dimensions_are_independent_problems():
    x, pos, neg = samples(2, 3, 6, 4), samples(2, 3, 5, 4, seed=1), samples(3, 4, 4, seed=2)
    got = dg.drift_field(x, pos, neg, temperature=0.5, negative_weight=torch.rand(4))
    assert got.shape == x.shape
    got = dg.drift_field(x, pos, neg, temperature=0.5)
    for i, j in np.ndindex(2, 3):
        close(got[i, j], twin.field(x[i, j], pos[i, j], neg[j], temperature=0.5))


def test_no_gradient_flows():
    x, pos = samples(6, 3).requires_grad_(), samples(5, 3, seed=1).requires_grad_()
    assert not dg.drift_field(x, pos, temperature=0.5).requires_grad
    assert not dg.mmd_field(x, pos, temperature=0.5).requires_grad


def test_self_mask():
    x, pos, extra = samples(6, 3), samples(5, 3, seed=1), samples(2, 3, seed=2)
    own = dg.drift_field(x, pos, temperature=0.5)
    assert torch.equal(dg.drift_field(x, pos, x, temperature=0.5), own)
    assert torch.equal(dg.drift_field(x, pos, x.clone(), temperature=0.5, self_mask=True), own)
    unmasked = dg.drift_field(x, pos, x.clone(), temperature=0.5)
    close(unmasked, twin.field(x, pos, x.clone(), temperature=0.5))
    assert not torch.allclose(unmasked, own)
    # The first N negatives are x itself, followed by further ones, as in the loss.
    plain = dg.DriftingLoss(0.5, normalize_features=False, normalize_drift=False)
    mixed = dg.drift_field(x, pos, torch.cat([x, extra]), temperature=0.5, self_mask=True)
    torch.testing.assert_close(mixed.square().mean(), plain(x, pos, extra).loss)


# --- sinkhorn -------------------------------------------------------------------------------------------


def test_sinkhorn_marginals_agree():
    logits = -torch.cdist(samples(3, 8, 4), samples(3, 12, 4, seed=1)) / 0.5
    a = NORMALIZATIONS["sinkhorn"](logits, None).values.exp()
    torch.testing.assert_close(a.sum(-1), torch.ones(3, 8))
    torch.testing.assert_close(a.sum(-2), torch.full((3, 12), 8 / 12), rtol=2e-3, atol=0)
    # exp(log k − f − g): every 2x2 minor keeps its odds ratio.
    odds = (a.log() - logits)[:, 0, 0] + (a.log() - logits)[:, 1, 1]
    torch.testing.assert_close(odds, (a.log() - logits)[:, 0, 1] + (a.log() - logits)[:, 1, 0])


@pytest.mark.parametrize("own", [True, False])
def test_sinkhorn_agrees_with_the_twin(own):
    x, pos, neg = samples(6, 3), samples(5, 3, seed=1), None if own else samples(4, 3, seed=2)
    exact = functools.partial(sinkhorn, steps=3000, tolerance=1e-6)
    got = dg.drift_field(x, pos, neg, temperature=0.8, normalization=exact)
    close(got, twin.field(x, pos, neg, temperature=0.8, normalization="sinkhorn"), 1e-4)


def test_user_functions():
    """A kernel with compact support, whose logarithm is −∞ outside, and a normalization that returns a
    tensor.
    """
    x, pos, neg = samples(6, 3), samples(5, 3, seed=1), samples(4, 3, seed=2)

    def compact(distance, temperature):
        return (1 - distance / temperature).clamp(min=0).log()

    v = dg.drift_field(x, pos, neg, temperature=2.0, kernel=compact)
    assert v.isfinite().all()
    assert v.abs().max() > 0
    own = dg.drift_field(x, pos, neg, temperature=0.5, normalization=lambda logits, _: logits.softmax(-1))
    torch.testing.assert_close(own, dg.drift_field(x, pos, neg, temperature=0.5, normalization="y"))


def test_sinkhorn_does_not_depend_on_the_rest_of_the_batch():
    easy, hard = samples(6, 4), samples(6, 4, seed=1) * 5
    pos = samples(2, 5, 4, seed=2)
    options = {"temperature": 0.5, "normalization": "sinkhorn"}
    together = dg.drift_field(torch.stack([easy, hard]), pos, **options)
    torch.testing.assert_close(together[0], dg.drift_field(easy, pos[0], **options), rtol=1e-6, atol=1e-7)


# --- MMD ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_mmd_field_is_minus_half_the_gradient(kernel):
    def xi(a, b):
        gap = (a[:, None] - b[None]).square().sum(-1)
        if kernel == "gaussian":
            return (-gap / (2 * 0.8**2)).exp()
        # Autograd of sqrt is NaN at 0; the kernel of a sample with itself is 1 for all x.
        return torch.where(gap > 0, (-torch.where(gap > 0, gap, 1.0).sqrt() / 0.8).exp(), 1.0)

    x = samples(6, 3).double().requires_grad_()
    pos, neg = samples(5, 3, seed=1).double(), samples(4, 3, seed=2).double()
    per_sample = (2 * xi(x, neg).mean(1) - 2 * xi(x, pos).mean(1)).sum()
    (gradient,) = torch.autograd.grad(per_sample, x)
    close(dg.mmd_field(x, pos, neg, temperature=0.8, kernel=kernel), -gradient / 2)
    # If x is also the sample of q: −N/2 times the gradient of the batch loss.
    (gradient,) = torch.autograd.grad(xi(x, x).mean() - 2 * xi(x, pos).mean(), x)
    close(dg.mmd_field(x, pos, temperature=0.8, kernel=kernel), -6 * gradient / 2)


@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_mmd_field_of_hard_inputs(kernel):
    x, pos = samples(8, 3), samples(5, 3, seed=1)
    for gap in (1e-3, 1e-5):
        x[1] = x[0] + gap * samples(3, seed=2)
        got = dg.mmd_field(x, pos, temperature=0.8, kernel=kernel)
        close(got, twin.mmd(x, pos, 0.8, kernel), 1e-5)
    for size, temperature in ((1e-40, 1.0), (1e-30, 1e-30), (1e30, 1.0), (1.0, 1e-30)):
        assert dg.mmd_field(x * size, pos * size, temperature=temperature, kernel=kernel).isfinite().all()
    offset = [t.double() * 0.01 + 1000 for t in (x, pos)]
    close(dg.mmd_field(*offset, temperature=0.01, kernel=kernel), twin.mmd(*offset, 0.01, kernel), 1e-5)


# --- wrong input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be a positive number"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1e-40}, "temperature=1e-40"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"attraction": math.nan}, "attraction=nan must be a number from -1e6 to 1e6"),
        ({"repulsion": "a"}, "repulsion='a' must be a number from -1e6 to 1e6"),
        ({"kernel": ["laplace"]}, "kernel=['laplace'] is not known"),
        (
            {"positive_weight": torch.ones(5, dtype=torch.complex64)},
            "positive_weight has dtype torch.complex64",
        ),
        ({"positive_weight": torch.full((5,), 1e30)}, "positive_weight must be between 0 and 1e8"),
        ({"kernel": "laplac"}, "did you mean 'laplace'"),
        ({"normalization": "bot"}, "did you mean 'both'"),
        ({"positives": torch.zeros(0, 3)}, "positives must have shape"),
        ({"positives": torch.zeros(4, 2)}, "positives has width 2, but x has width 3"),
        ({"negatives": torch.zeros(4, 2)}, "negatives has width 2"),
        ({"negatives": torch.zeros(4, 3, device="meta")}, "negatives is on the meta device, without values"),
        ({"positives": torch.zeros(4, 3).log() * 0}, "positives contains NaN"),
        ({"positives": torch.zeros(7, 4, 3), "x": torch.zeros(6, 4, 3)}, "leading dimensions"),
        ({"x": torch.zeros(3)}, "x must have shape"),
        ({"x": torch.zeros(4, 3, dtype=torch.int64)}, "x must hold floating-point"),
        ({"x": np.zeros((4, 3))}, "x must be a torch.Tensor"),
        ({"positive_weight": torch.ones(3)}, "positive_weight has shape [3], expected [5]"),
        ({"positive_weight": -torch.ones(5)}, "positive_weight must be between 0 and 1e8"),
        ({"negatives": torch.zeros(2, 3), "self_mask": True}, "self_mask=True"),
    ],
)
def test_wrong_input_names_the_argument(change, message):
    arguments = {"x": samples(6, 3), "positives": samples(5, 3), "temperature": 0.5} | change
    with pytest.raises(ValueError, match=r".") as error:
        dg.drift_field(**arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_distances_far_beyond_the_temperature():
    """The exact field, or one line: a clamp would make all distances equal."""
    x, p = samples(6, 2).double(), samples(6, 2, seed=1).double()
    for kernel, scales in (("inverse_multiquadric", (1e17, 1e19, 1e22)), ("laplace", (1e17, 1e19, 1e30))):
        near = dg.drift_field(x, p, temperature=1e-10, kernel=kernel)
        for scale in scales:
            for dtype in (torch.float32, torch.float64):
                large = ((t * scale).to(dtype) for t in (x, p))
                far = dg.drift_field(*large, temperature=1.0, kernel=kernel).double() / scale
                assert torch.allclose(far, near.double(), rtol=1e-4, atol=1e-6)
    fails(
        lambda: dg.drift_field(x * 1e20, p * 1e20, temperature=1.0, kernel="gaussian"),
        "^temperature=1 is too low for samples that are .* apart or more: raise it",
    )
    fails(lambda: dg.DriftingLoss((1e-20,)), "^temperatures=1e-20 must be at least 1e-12")
    loss = dg.DriftingLoss((1.0,), kernel="gaussian", normalize_features=False)
    fails(lambda: loss((x * 1e20).float(), (p * 1e20).float()), "rescale the samples")
