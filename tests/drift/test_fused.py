"""GPU kernels of the loss against float64, on an NVIDIA GPU or in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.drift.fused import engine, gradient_triton, passes_triton
from driftgen.drift.loss import Statistics
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators.image_mlp import ImageMLP
from driftgen.ops import dispatch
from driftgen.ops.compile import to_channels_last
from driftgen.ops.launch import Launch
from driftgen.training.step import DriftStep, guided_inputs
from tests.support import twin
from tests.support.accuracy import error
from tests.support.cases import slow_after
from tests.support.golden_losses import CASES, deviation, exact, golden_inputs
from tests.support.interpreter import (  # noqa: F401
    DEVICE,
    _bfloat16_on_the_cpu,
    _kernels_at_all_temperatures,
    _kernels_everywhere,
)
from tests.support.kernel_losses import KINDS, compare, error_of_distant_clusters, features, run, samples

pytest.importorskip("triton")
PASSES = (passes_triton.scale_kernel, passes_triton.products_kernel, gradient_triton.gradient_kernel)


@pytest.fixture
def launches(monkeypatch):
    """Record the launches of the passes."""
    launched, real = [], Launch.__call__

    def call(self, *tensors):
        if self.kernel in PASSES:
            launched.append(self.kernel)
        real(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", call)
    return launched


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", slow_after(1, KINDS))
def test_release(kind, dtype, launches):
    gen, neg, pos = samples(kind, (12, 5, 9), 34, groups=2 if kind == "random" else 1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", slow_after(1, [33, 1, 32, 130]))
def test_widths(width, dtype, launches):
    gen, neg, pos = samples("random", (10, 3, 5), width, groups=1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 0, 1), (1, 7, 30), (17, 0, 16), (33, 1, 65)], ids=str)
def test_sizes(sizes, dtype, launches):
    gen, neg, pos = samples("random", sizes, 34, dtype=dtype)
    compare(gen, pos, neg if sizes[1] else None, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_the_paper(kind, dtype, launches):
    gen, neg, pos = samples(kind, (64, 16, 64), 256, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [255, 1000, 4096, 8192])
def test_wide(width, dtype, launches):
    gen, neg, pos = samples("random", (24, 3, 20), width, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(64, 32, 128), (64, 0, 64), (63, 17, 61), (1, 128, 128)], ids=str)
def test_largest_sizes(sizes, dtype, launches):
    gen, neg, pos = samples("random", sizes, 70, dtype=dtype)
    compare(gen, pos, neg if sizes[1] else None, twin.release_loss)
    assert len(launches) == 3


def test_a_single_group(launches):
    gen, neg, pos = samples("random", (10, 1, 3), 40, groups=1)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_thousands_of_groups(dtype, launches):
    gen, neg, pos = samples("random", (10, 1, 3), 40, groups=4096, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.parametrize("key", slow_after(1, ["c00", "c07", "c09", "c13", "c15", "c17"]))
def test_goldens(key, launches):
    gen, pos, neg, wn = golden_inputs(key)
    temperatures = CASES[key]["R_list"]
    gen = gen.to(DEVICE).requires_grad_()
    pos, neg = (None if t is None else t.to(DEVICE) for t in (pos, neg))
    out = dg.DriftingLoss(temperatures)(gen, pos, neg, negative_weight=wn)
    out.per_group.sum().backward()
    assert len(launches) == 3
    host = (None if t is None else t.detach().cpu() for t in (gen, pos, neg))
    expected = exact(twin.release_loss, *host, temperatures, wn)
    for got, best in zip((out.per_group, out.scale, out.drift), expected, strict=False):
        assert deviation(got.detach().float().cpu().numpy(), best) < 1e-5
    rounded = 2**-8 if gen.dtype == torch.bfloat16 else 1e-5
    assert deviation(gen.grad.float().cpu().numpy(), expected[-1]) < rounded


@pytest.mark.parametrize("kernel", slow_after(1, ["laplace", "gaussian", "inverse_multiquadric"]))
@pytest.mark.parametrize("normalization", ["both", "y"])
def test_paper(kernel, normalization, launches):
    gen, neg, pos = samples("random", (8, 4, 7), 10)
    rng = np.random.default_rng(1)
    weights = [rng.uniform(0.2, 2, (2, n)) for n in (8, 4, 7)]
    compare(
        gen, pos, neg,
        lambda *a: twin.paper_loss(*a, kernel=kernel, normalization=normalization),
        weights, convention="paper", kernel=kernel, normalization=normalization, temperatures=(0.1, 0.3),
    )  # fmt: skip
    assert len(launches) == 3


@pytest.mark.parametrize("gap", slow_after(1, [1e5, 1e2, 1e3, 1e4]))
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_distant_clusters(convention, gap, launches):
    """Sample by sample: one origin for both clusters would cost the far one gap · 2⁻²⁴ of its spread."""
    assert error_of_distant_clusters(convention, gap, (20, 6, 16), 5) < 1e-6
    assert len(launches) == 3


@pytest.mark.interpreter
@pytest.mark.parametrize("width", [8, 34])
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_ordinary_groups_do_not_take_the_way_of_distant_clusters(convention, width, monkeypatch):
    """It takes several times as long."""

    def refuse(*arguments):
        raise AssertionError("drifts are computed from differences")

    monkeypatch.setattr(passes_triton, "drift_coordinate", refuse)
    monkeypatch.setattr(gradient_triton, "drift_coordinate", refuse)
    gen, neg, pos = samples("random", (20, 6, 16), width)
    loss = dg.DriftingLoss((0.05, 0.2), convention=convention)
    run(loss, gen, pos, neg)
    gen[:, 10:] += 1e4
    with pytest.raises(Exception, match="differences"):
        run(loss, gen, pos, neg)


@pytest.mark.parametrize("convention", ["release", "paper"])
def test_weights_may_be_zero(convention, launches):
    """Weights of unconditional negatives are 0 without guidance. Here they are also the nearest samples."""
    gen, _, pos = samples("random", (6, 0, 5), 10)
    neg = gen[:, :3] + 1e-3
    weights = [np.ones((2, 6)), np.zeros((2, 3)), np.ones((2, 5))]
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg, exact, weights, convention=convention)
    assert len(launches) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperatures", [(0.05,), (0.02, 0.05), (0.02, 0.05, 0.2), (0.01, 0.02, 0.05, 1.0)], ids=str
)
def test_temperatures(temperatures, launches):
    gen, neg, pos = samples("random", (6, 3, 5), 10)
    compare(gen, pos, neg, twin.release_loss, temperatures=temperatures)
    assert len(launches) == 3


@pytest.mark.parametrize(
    "options",
    slow_after(1, [{}, {"convention": "paper", "attraction": 1.5, "normalize_drift": False}]),
    ids=str,
)
def test_many_features_agree_with_the_eager_engine(options, launches, monkeypatch):
    pos, neg = features(1, 5, torch.float32), features(2, 3, torch.float32)
    weight = torch.tensor([0.0, 2.5])
    got = []
    for places in ({"cuda", "cpu"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        gen = features(0, 7, torch.float32, requires=True)
        out = dg.DriftingLoss(**options)(gen, pos, neg, negative_weight=weight)
        (out.loss + 0.3 * out.per_group[1]).backward()
        got.append((out, gen))
        assert len(launches) == 6  # two widths, three passes; none in PyTorch
    (out, gen), (other, exact) = got
    assert error(out.loss, other.loss) < 1e-5
    assert error(out.per_group, other.per_group) < 1e-5
    for name in exact:
        assert error(out.scale[name], other.scale[name]) < 1e-5
        assert error(out.drift[name], other.drift[name]) < 1e-5
        assert error(gen[name].grad, exact[name].grad) < 1e-4


@pytest.mark.slow
def test_given_statistics(monkeypatch):
    pos = features(1, 5, torch.float32)
    loss, got = dg.DriftingLoss(), []
    for places in ({"cuda", "cpu"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        gen = features(0, 7, torch.float32, requires=True)
        scale, drift = torch.full((3,), 3.0, device=DEVICE), torch.full((3, 3), 0.2, device=DEVICE)
        out = loss(gen, pos, statistics=Statistics(scale, drift, 8))
        out.loss.backward()
        got.append((out.loss, gen["a"].grad))
    assert error(got[0][0], got[1][0]) < 1e-5
    assert error(got[0][1], got[1][1]) < 1e-4


@pytest.mark.slow
def test_two_runs_are_the_same_to_the_bit_and_nothing_is_left_unwritten(monkeypatch):
    """Fill all allocated memory with NaN first."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: real(*a, **k).fill_(math.nan))
    pos, neg = features(1, 5, torch.bfloat16), features(2, 3, torch.bfloat16)
    runs = []
    for _ in range(2):
        gen = features(0, 9, torch.bfloat16, requires=True)
        out = dg.DriftingLoss()(gen, pos, neg)
        out.loss.backward()
        runs.append(
            [out.loss.detach(), out.per_group.detach(), *out.drift.values(), *(g.grad for g in gen.values())]
        )
    for first, second in zip(*runs, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


@pytest.mark.slow
def test_gradients_may_be_asked_for_twice():
    gen, neg, pos = (t.to(DEVICE) for t in samples("random", (6, 3, 5), 10))
    gen.requires_grad_()
    out = dg.DriftingLoss()(gen, pos, neg)
    (first,) = torch.autograd.grad(out.loss, gen, retain_graph=True)
    (second,) = torch.autograd.grad(4 * out.loss, gen)
    assert first.dtype == gen.dtype
    assert torch.equal(4 * first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.loss, gen)


@pytest.mark.slow
def test_strided_and_unaligned_samples():
    gen, neg, pos = (t.to(DEVICE) for t in samples("random", (6, 3, 5), 12))
    expected, gradient = run(dg.DriftingLoss(), gen, pos, neg)
    strided = torch.cat([pos, pos], dim=2)[:, :, :12]
    odd = torch.cat([neg.flatten()[:1], neg.flatten()])[1:].view(neg.shape)
    got, other = run(dg.DriftingLoss(), gen.transpose(1, 2).contiguous().transpose(1, 2), strided, odd)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(gradient, other)
    together = torch.cat([pos, neg], dim=1)
    parts = together[:, :5], together[:, 5:]
    assert all(engine._aligned(part[:, :, None]).data_ptr() == part.data_ptr() for part in parts)
    got, other = run(dg.DriftingLoss(), gen, *parts)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(gradient, other)


@pytest.mark.slow
def test_a_step_in_mixed_precision_is_supported(launches, monkeypatch):
    """All features have one dtype that the kernels support, and large features are not copied."""
    torch.manual_seed(0)
    mae = ResNetMAE(in_channels=1, base_channels=32, blocks=(1,), decoder=False)
    phi = FeatureStack([(mae, {"patch_sizes": (), "every_k_block": 0})]).to(DEVICE)
    to_channels_last(phi)
    network = ImageMLP(input_size=2, in_channels=1, num_classes=3, hidden_size=16, depth=1).to(DEVICE)
    step = DriftStep(network, phi.features, dg.DriftingLoss(0.05), generated=10, autocast=torch.bfloat16)
    real, copied = engine._aligned, []

    def aligned(tensor):
        result = real(tensor)
        if result.data_ptr() != tensor.data_ptr():
            copied.append(list(tensor.shape))
        return result

    monkeypatch.setattr(engine, "_aligned", aligned)
    inputs = guided_inputs(
        network.sample_noise(10),
        torch.tensor([1], device=DEVICE),
        torch.tensor([1.5], device=DEVICE),
        torch.randn(1, 4, 1, 2, 2, device=DEVICE),
        torch.randn(1, 2, 1, 2, 2, device=DEVICE),
        generated=10,
    )
    out = step(inputs)
    assert out.loss.isfinite()
    assert set(launches) == set(PASSES)
    assert not [shape for shape in copied if shape[2] > 1]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
