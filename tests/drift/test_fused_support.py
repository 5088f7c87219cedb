"""Calls of the loss that the GPU kernels support, the warning for others, and what both engines share."""

import warnings

import pytest
import torch
import torch.distributed as dist

import driftgen as dg
from driftgen.drift import loss as loss_module
from driftgen.drift.batching import buckets_by_width
from driftgen.drift.fused import tables, unsupported_reason
from driftgen.drift.interfaces import LossCall
from driftgen.ops import dispatch
from tests.support.accuracy import error
from tests.support.cases import slow_after
from tests.support.interpreter import DEVICE, _bfloat16_on_the_cpu, _kernels_everywhere  # noqa: F401

pytest.importorskip("triton")


def my_kernel(distance, temperature):
    return -distance / temperature


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"kernel": "inverse_multiquadric"}, None),
        ({"kernel": "gaussian", "temperatures": (0.4, 0.5)}, None),
        (
            {"kernel": "gaussian", "temperatures": (0.3, 0.5)},
            "drifts may underflow at temperature 0.3 with 4 positives and 7 negatives for each of 4 samples",
        ),
        ({"temperatures": (2e-4, 0.2)}, None),
        ({"temperatures": (1.9e-4, 0.2)}, "temperature 0.00019 is too low for distances in float32"),
        ({"kernel": "gaussian", "temperatures": 0.009, "normalize_drift": False}, "is too low for distances"),
        ({"normalization": "y", "temperatures": 0.2}, None),
        ({"normalization": "y"}, "drifts may underflow at temperature 0.02"),
        ({"convention": "paper", "temperatures": 0.2}, None),
        ({"convention": "paper"}, "drifts may underflow at temperature 0.02"),
        ({"convention": "paper", "normalize_drift": False}, None),
        (
            {"convention": "paper", "temperatures": 0.2, "sizes": (4, 4, 1)},
            "with 1 positives and 7 negatives",
        ),
        (
            {"convention": "paper", "temperatures": 0.2, "sizes": (1, 1, 8)},
            "with 8 positives and 1 negatives",
        ),
        ({"convention": "paper", "temperatures": 0.2, "sizes": (1, 0, 8)}, None),
        ({"convention": "paper", "temperatures": 0.2, "types": (torch.float16,) * 3}, "drifts may underflow"),
        ({"normalize_drift": False}, None),
        ({"attraction": 1.5, "repulsion": 0.0}, None),
        ({"normalization": "none"}, "normalization 'none' has no GPU kernel"),
        ({"normalization": "sinkhorn"}, "normalization 'sinkhorn' has no GPU kernel"),
        ({"normalize_features": False}, "normalize_features=False has no GPU kernel"),
        ({"kernel": my_kernel}, "kernel 'my_kernel' has no GPU kernel"),
        ({"temperatures": (1.0,) * 5}, "5 temperatures, the kernels take up to 4"),
        ({"sizes": (64, 32, 128)}, None),
        ({"sizes": (65, 33, 129)}, None),
        ({"sizes": (1024, 64, 4032)}, None),
        ({"sizes": (1025, 16, 16)}, "groups have 1025 generated samples, the kernels take up to 1024"),
        (
            {"sizes": (8, 65, 4032)},
            "groups have 4032 positives and 65 negatives, the kernels take up to 4096 of both",
        ),
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


def test_drifts_below_float32_are_left_to_the_eager_engine():
    """Positives far away: at temperature 0.02 the kernels would return a loss of 0."""
    rng = torch.Generator().manual_seed(0)
    gen, pos = (
        torch.randn(64, 64, generator=rng).to(DEVICE),
        torch.randn(16, 64, generator=rng).to(DEVICE) + 20,
    )
    for temperatures in (0.02, 0.2):
        out = dg.DriftingLoss(temperatures, convention="paper")(gen, pos)
        assert out.loss.item() == pytest.approx(1, rel=1e-5)


def test_drifts_of_far_negatives_are_left_to_the_eager_engine():
    """One negative among many positives: the kernels would return a loss of 0."""
    rng = torch.Generator().manual_seed(0)
    gen = torch.randn(1, 4, generator=rng).to(DEVICE)
    pos = gen + torch.randn(16, 4, generator=rng).to(DEVICE) / 1000
    out = dg.DriftingLoss(0.3, kernel="gaussian")(gen, pos, gen + 2)
    assert out.loss.item() == pytest.approx(1, rel=1e-5)


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
    few, many = (torch.randn(1, n, 2, device=DEVICE) for n in (4, 1025))
    for loss in (dg.DriftingLoss(kernel=my_kernel), dg.DriftingLoss(kernel=my_kernel)):
        (warning,) = caught_warnings(loss, few, few, many)
        assert str(warning.message).startswith("DriftingLoss runs in plain PyTorch on ")
        assert ": kernel 'my_kernel' has no GPU kernel (" in str(warning.message)
        assert warning.category is UserWarning
        assert warning.filename == __file__  # the caller of the loss
    first, second = caught_warnings(dg.DriftingLoss(), many, few.double(), many, few.double(), few)
    assert "groups have 1025 generated samples, the kernels take up to 1024" in str(first.message)
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


@pytest.mark.slow
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

    alone, shared = run_engine(None), run_engine(dist.ProcessGroup(0, 2))
    assert [list(sums.shape) for sums in reduced] == [[2, 3], [2, 2, 2]]
    monkeypatch.setattr(dispatch, "DEVICES", set())
    eager = run_engine(dist.ProcessGroup(0, 2))
    for left, right in ((shared, alone), (shared, eager), (reduced[:2], reduced[2:])):
        for a, b in zip(left, right, strict=True):
            assert error(a, b) < 1e-5


@pytest.mark.slow
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


@pytest.mark.parametrize("places", slow_after(1, [set(), {"cpu", "cuda"}]), ids=["PyTorch", "kernels"])
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
