"""GPU kernels of the loss against float64, on an NVIDIA GPU or in Triton's interpreter."""

import math
import warnings

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.drift import loss as loss_module
from driftgen.drift.batching import buckets_by_width
from driftgen.drift.fused import engine, tables, unsupported_reason
from driftgen.drift.fused import passes_triton as kernels
from driftgen.drift.interfaces import LossCall
from driftgen.drift.loss import Statistics
from driftgen.features import FeatureStack, ResNetMAE
from driftgen.generators.image_mlp import ImageMLP
from driftgen.ops import dispatch
from driftgen.ops.compile import to_channels_last
from driftgen.ops.launch import Launch
from driftgen.training.step import DriftStep, guided_inputs
from tests.support import twin
from tests.support.accuracy import error
from tests.support.golden_losses import CASES, deviation, exact, golden_inputs
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401

pytest.importorskip("triton")
LIFT = 2**10
PASSES = (kernels.scale_kernel, kernels.products_kernel, kernels.gradient_kernel)
# Maximum relative errors.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 2e-3, torch.float16: 1e-3}


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


def samples(kind, sizes, width, groups=2, dtype=torch.float32, seed=0):
    """Draw generated, negatives and positives ``[groups, n, width]``, rounded to the dtype."""
    rng = np.random.default_rng(seed)
    offset, centers = 30 * rng.normal(size=width), rng.normal(size=(3, width))
    out = []
    for number, n in enumerate(sizes):
        x = rng.normal(size=(groups, n, width)) + 0.3 * number
        if kind == "offset":
            x += offset
        if kind == "far":
            x += 200
        if kind == "clustered":
            x = centers[rng.integers(0, 3, (groups, n))] + 1e-2 * x
        if kind == "duplicate":
            x[:, 1::2] = x[:, : n // 2]
            if number:
                x[:, :4] = out[0][:, :1]
        if kind == "outlier":
            x[0, -1] *= 1e4
        out.append(x)
    return [torch.tensor(x).to(dtype) for x in out]


def run(loss, gen, pos, neg=None, **weights):
    gen = gen.to(DEVICE).clone().requires_grad_()
    out = loss(gen, pos.to(DEVICE), None if neg is None else neg.to(DEVICE), **weights)
    # A scaled loss, as in mixed precision: float16 underflows at 6e-8.
    (gradient,) = torch.autograd.grad(LIFT * out.loss, gen)
    return out, gradient.double() / LIFT


def compare(gen, pos, neg, exact, weights=None, **options):
    """Compare the kernels with the twin on inputs rounded to the dtype."""
    dtype, groups = gen.dtype, gen.shape[0]
    sizes = [gen.shape[1], 0 if neg is None else neg.shape[1], pos.shape[1]]
    wg, wn, wp = weights or [np.ones((groups, n)) for n in sizes]
    loss = dg.DriftingLoss(**options)
    named = {}
    if weights:
        named = {
            "generated_weight": wg,
            "positive_weight": wp,
            **({} if neg is None else {"negative_weight": wn}),
        }
        named = {k: torch.tensor(w, dtype=torch.float32) for k, w in named.items()}
    out, gradient = run(loss, gen, pos, neg, **named)
    empty = torch.zeros(groups, 0, gen.shape[2])
    per_group, scale, drift, expected = exact(
        gen.double(), pos.double(), (empty if neg is None else neg).double(), loss.temperatures, wg, wn, wp
    )
    assert error(out.scale, scale) < ALLOWED[dtype]
    assert error(out.drift, drift) < ALLOWED[dtype]
    assert error(out.per_group, per_group) < ALLOWED[dtype]
    assert error(out.loss, np.mean(per_group)) < ALLOWED[dtype]
    # Rounding a few gradients to 16 bits alone may exceed the allowed error.
    rounded = (torch.tensor(expected) * LIFT / groups).to(dtype).double() / LIFT
    assert error(gradient * groups, expected) < max(ALLOWED[dtype], 1.2 * error(rounded * groups, expected))
    return out, gradient


def my_kernel(distance, temperature):
    return -distance / temperature


KINDS = ["random", "offset", "far", "clustered", "duplicate", "outlier"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_release(kind, dtype, launches):
    gen, neg, pos = samples(kind, (12, 5, 9), 34, groups=2 if kind == "random" else 1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 32, 33, 130])
def test_widths(width, dtype, launches):
    gen, neg, pos = samples("random", (10, 3, 5), width, groups=1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert len(launches) == 3


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


@pytest.mark.parametrize("key", ["c00", "c07", "c09", "c13", "c15", "c17"])
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


@pytest.mark.parametrize("kernel", ["laplace", "gaussian", "inverse_multiquadric"])
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


@pytest.mark.parametrize("convention", ["release", "paper"])
def test_weights_may_be_zero(convention, launches):
    """Weights of unconditional negatives are 0 without guidance. Here they are also the nearest samples."""
    gen, _, pos = samples("random", (6, 0, 5), 10)
    neg = gen[:, :3] + 1e-3
    weights = [np.ones((2, 6)), np.zeros((2, 3)), np.ones((2, 5))]
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg, exact, weights, convention=convention)
    assert len(launches) == 3


@pytest.mark.parametrize(
    "temperatures", [(0.05,), (0.02, 0.05), (0.02, 0.05, 0.2), (0.01, 0.02, 0.05, 1.0)], ids=str
)
def test_temperatures(temperatures, launches):
    gen, neg, pos = samples("random", (6, 3, 5), 10)
    compare(gen, pos, neg, twin.release_loss, temperatures=temperatures)
    assert len(launches) == 3


def features(seed, n, dtype, requires=False):
    rng = torch.Generator().manual_seed(seed)
    shapes = {"a": (2, 4), "b": (1, 4), "d": (1, 34)}
    out = {k: torch.randn(2, n, *s, generator=rng).to(dtype) + 0.1 * seed for k, s in shapes.items()}
    return {k: v.to(DEVICE).requires_grad_(requires) for k, v in out.items()}


@pytest.mark.parametrize(
    "options", [{}, {"convention": "paper", "attraction": 1.5, "normalize_drift": False}], ids=str
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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kernel": "gaussian"}, None),
        ({"normalization": "y"}, None),
        ({"convention": "paper"}, None),
        ({"normalize_drift": False}, None),
        ({"attraction": 1.5, "repulsion": 0.0}, None),
        ({"normalization": "none"}, "normalization 'none' has no GPU kernel"),
        ({"normalization": "sinkhorn"}, "normalization 'sinkhorn' has no GPU kernel"),
        ({"normalize_features": False}, "normalize_features=False has no GPU kernel"),
        ({"kernel": my_kernel}, "kernel 'my_kernel' has no GPU kernel"),
        ({"temperatures": (1.0,) * 5}, "5 temperatures, the kernels take up to 4"),
        ({"sizes": (64, 32, 128)}, None),
        ({"sizes": (65, 16, 16)}, "groups have 65 generated samples, the kernels take up to 64"),
        ({"sizes": (64, 33, 128)}, "64 generated, 128 positive and 33 negative samples do not fit"),
        ({"sizes": (8, 4, 129)}, "groups have 129 positives, the kernels take up to 128"),
        ({"sizes": (8, 129, 4)}, "groups have 129 negatives, the kernels take up to 128"),
        ({"types": (torch.bfloat16,) * 3}, None),
        ({"types": (torch.float16,) * 3}, None),
        ({"types": (torch.float64,) * 3}, "samples are float64"),
        ({"types": (torch.bfloat16, torch.float32, torch.float32)}, "mix the dtypes bfloat16 and float32"),
    ],
)
def test_support(change, reason):
    change = dict(change)
    sizes, types = change.pop("sizes", (4, 4, 4)), change.pop("types", (torch.float32,) * 3)
    gen, neg, pos = (
        {"": torch.zeros(1, n, 1, 8, dtype=t, device=DEVICE)} for n, t in zip(sizes, types, strict=True)
    )
    got = unsupported_reason(dg.DriftingLoss(**change).settings, buckets_by_width(gen, pos, neg))
    assert got is None if reason is None else reason in got


@pytest.mark.parametrize(("vectors", "supported"), [(2**22 - 1, True), (2**22, False)])
def test_groups_are_indexed_with_32_bits(vectors, supported):
    large = {"": torch.zeros(1, device=DEVICE).expand(2, 64, vectors, 8)}
    reason = unsupported_reason(dg.DriftingLoss().settings, buckets_by_width(large, large, None))
    assert (reason is None) is supported


def test_a_cpu_has_no_kernels(monkeypatch):
    monkeypatch.undo()
    here = {"": torch.zeros(1, 2, 1, 8)}
    reason = unsupported_reason(dg.DriftingLoss().settings, buckets_by_width(here, here, None))
    assert reason == "no kernels run on device cpu"


def caught_warnings(loss, *sets):
    """Call the loss with each set as generated and positives, and return its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for generated in sets:
            loss(generated, generated)
    return seen


def test_a_loss_outside_the_kernels_warns_once_for_each_reason():
    few, many = (torch.randn(1, n, 8, device=DEVICE) for n in (4, 65))
    for loss in (dg.DriftingLoss(kernel=my_kernel), dg.DriftingLoss(kernel=my_kernel)):
        (warning,) = caught_warnings(loss, few, few, many)
        assert str(warning.message).startswith("DriftingLoss runs in plain PyTorch on ")
        assert str(warning.message).endswith(": kernel 'my_kernel' has no GPU kernel")
        assert warning.category is UserWarning
        assert warning.filename == __file__  # the caller of the loss
    first, second = caught_warnings(dg.DriftingLoss(), many, few.double(), many, few.double(), few)
    assert "groups have 65 generated samples, the kernels take up to 64" in str(first.message)
    assert "samples are float64" in str(second.message)


@pytest.mark.parametrize("case", ["supported", "without kernels", "capture"])
def test_no_warning(case, monkeypatch):
    samples = torch.randn(1, 4, 8, device=DEVICE)
    loss = dg.DriftingLoss(**({} if case == "supported" else {"kernel": my_kernel}))
    if case == "without kernels":
        monkeypatch.setattr(dispatch, "DEVICES", set())
    if case == "capture":
        monkeypatch.setattr(loss_module, "is_capturing", lambda device: True)
    assert not caught_warnings(loss, samples)


def test_engines_all_reduce_the_same_sums(monkeypatch):
    """With a process group, statistics are summed and finished in two launches, with a collective between."""
    reduced = []
    monkeypatch.setattr(LossCall, "all_reduce", lambda call, sums: reduced.append(sums.clone()))
    sets = [{"narrow": torch.randn(2, n, 1, 4), "wide": torch.randn(2, n, 1, 6)} for n in (4, 3)]
    gen, pos = ({name: tensor.to(DEVICE) for name, tensor in features.items()} for features in sets)
    weight, leaves = torch.tensor([0.5, 2.0]), [tensor.requires_grad_() for tensor in gen.values()]

    def run_engine(process_group):
        out = dg.DriftingLoss((0.1, 0.5), process_group=process_group)(gen, pos, positive_weight=weight)
        values = out.loss, out.per_group, *out.scale.values(), *out.drift.values()
        return [*values, *torch.autograd.grad(out.loss + 0.3 * out.per_group[1], leaves)]

    alone, shared = run_engine(None), run_engine(object())
    assert [list(sums.shape) for sums in reduced] == [[2, 3], [2, 2, 2]]
    monkeypatch.setattr(dispatch, "DEVICES", set())
    eager = run_engine(object())
    for left, right in ((shared, alone), (shared, eager), (reduced[:2], reduced[2:])):
        for a, b in zip(left, right, strict=True):
            assert error(a, b) < 1e-5


def test_tables_of_a_captured_call(monkeypatch):
    """A captured call writes the same tables with kernels that other calls copy from the host."""
    sets = [
        {"a": torch.randn(2, n, 2, 4, device=DEVICE), "b": torch.randn(2, n, 1, 4, device=DEVICE)}
        for n in (4, 5, 6)
    ]
    built, real = [], tables._captured_table
    captured = lambda rows, device: built.append(real(rows, device)) or built[-1]  # noqa: E731
    monkeypatch.setattr(tables, "_captured_table", captured)
    for negatives in (sets[2], None):
        outs = []
        for now in (False, True):
            monkeypatch.setattr(tables, "is_capturing", lambda device, now=now: now)
            leaves = {name: tensor.clone().requires_grad_() for name, tensor in sets[0].items()}
            out = dg.DriftingLoss()(leaves, sets[1], negatives)
            outs.append([out.loss, *torch.autograd.grad(out.loss, list(leaves.values()))])
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert len(built) == 4  # with gradients and without, each time
    assert all(table.shape == (2, 10) and table.dtype == torch.int64 for table in built)


@pytest.mark.parametrize("places", [{"cpu", "cuda"}, set()], ids=["kernels", "PyTorch"])
def test_gradients_of_the_loss_and_of_its_shares_add_up(places, monkeypatch):
    monkeypatch.setattr(dispatch, "DEVICES", places)
    gen, pos, neg = (torch.randn(3, n, 8, device=DEVICE) for n in (4, 5, 2))
    gen.requires_grad_()
    out = dg.DriftingLoss()(gen, pos, neg)
    factor = torch.tensor([1.0, -2.0, 3.0], device=DEVICE)
    values = out.loss, (factor * out.per_group).sum(), 2 * out.loss + (factor * out.per_group).sum()
    of_loss, of_shares, of_both = (torch.autograd.grad(v, gen, retain_graph=True)[0] for v in values)
    assert error(of_both, 2 * of_loss + of_shares) < 1e-6
    assert error(out.per_group.mean(), out.loss) < 1e-6
