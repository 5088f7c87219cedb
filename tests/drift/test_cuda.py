"""Field and loss on a GPU: results, memory, launches, no synchronization, CUDA graphs."""

from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import driftgen as dg
from driftgen.drift.kernels import KERNELS
from driftgen.drift.normalization import NORMALIZATIONS
from driftgen.ops.dispatch import without_kernels
from tests.support import twin
from tests.support.feature_sets import feature_sets
from tests.support.golden_losses import CASES, GOLDEN, deviation, exact, golden_inputs, samples

pytestmark = pytest.mark.cuda


def to_gpu(*values):
    return [
        {k: t.detach().cuda() for k, t in v.items()} if isinstance(v, dict) else v if v is None else v.cuda()
        for v in values
    ]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_field(kernel, normalization):
    x, pos, neg = samples(3, 20, 7), samples(3, 30, 7, seed=1), samples(3, 10, 7, seed=2)
    options = {"temperature": 0.8, "kernel": kernel, "normalization": normalization}
    for n in (None, neg):
        got = dg.drift_field(*to_gpu(x, pos, n), **options).cpu()
        torch.testing.assert_close(got, dg.drift_field(x, pos, n, **options), rtol=1e-4, atol=2e-6)


def test_loss_at_a_temperature_below_float32():
    """Distances in float32 would change the affinities by percents."""
    loss = dg.DriftingLoss(temperatures=(1e-5, 1.0), normalize_drift=False)
    x, pos = samples(2, 20, 8), samples(2, 30, 8, seed=1)
    with pytest.warns(UserWarning, match="temperature 1e-05 is too low for distances in float32"):
        got = loss(*to_gpu(x, pos))
    torch.testing.assert_close(got.drift.cpu(), loss(x, pos).drift, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("outlier", range(6))
def test_field_with_an_offset_and_an_outlier(dtype, outlier):
    x, pos = (samples(k, 4, seed=k, scale=0.01).to(dtype) + 1000 for k in (6, 5))
    x[outlier] = 1e6
    got = dg.drift_field(x.cuda(), pos.cuda(), temperature=0.01).cpu()
    near = [i for i in range(6) if i != outlier]
    assert deviation(got[near], twin.field(x, pos, temperature=0.01)[near]) <= 1e-5
    assert got.isfinite().all()


def test_denormals():
    """Eager engine only: the kernels do not support denormals."""
    gen, pos = samples(2, 6, 4), samples(2, 5, 4, seed=1)
    loss = dg.DriftingLoss(convention="paper")
    with without_kernels():
        small = loss((gen * 1e-40).cuda(), (pos * 1e-40).cuda())
    assert deviation(small.per_group.cpu(), loss(gen, pos).per_group) <= 1e-2


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("key", CASES)
def test_release_goldens(key, kernels):
    gen, pos, neg, wn = golden_inputs(key)
    leaf = gen.cuda().requires_grad_()
    with nullcontext() if kernels else without_kernels():
        out = dg.DriftingLoss(CASES[key]["R_list"])(leaf, *to_gpu(pos, neg), negative_weight=wn)
    out.per_group.sum().backward()
    got = [t.detach().float().cpu().numpy() for t in (out.per_group, out.scale, out.drift, leaf.grad)]
    want = exact(twin.release_loss, gen, pos, neg, CASES[key]["R_list"], wn)
    for value, exact_value, name in zip(got, want, ("loss", "scale", "lossR", "grad"), strict=True):
        tolerance = 2**-8 if (key, name) == ("c17", "grad") else 1e-5
        if kernels:
            tolerance = max(tolerance, 2e-3 if gen.dtype == torch.bfloat16 else 1e-4)
        assert deviation(value, exact_value) <= tolerance, name
        own_error = CASES[key]["rel_dev_float32_vs_exact_float64"][name]
        if key not in ("c09", "c15", "c17"):
            assert deviation(value, GOLDEN[f"{key}_{name}"]) <= max(tolerance, 1.1 * own_error), name


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feature_sets_agree_with_the_cpu(dtype, chunk):
    gen, pos, neg = feature_sets(dtype=dtype)
    wn = torch.rand(4, 3)

    def run(gen, pos, neg):
        for t in gen.values():
            t.requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = dg.DriftingLoss(chunk=chunk)(gen, pos, neg, negative_weight=wn)
        out.loss.backward()
        return [
            out.loss.detach(),
            out.per_group.detach(),
            *out.drift.values(),
            *(t.grad for t in gen.values()),
        ]

    for a, b in zip(run(*to_gpu(gen, pos, neg)), run(gen, pos, neg), strict=True):
        exact_enough = 2e-3 if dtype == torch.bfloat16 else 1e-4  # the accuracy of the kernels
        tolerance = 2**-7 if a.dtype == torch.bfloat16 else exact_enough
        assert deviation(a.float().cpu(), b.float()) <= tolerance


def test_no_synchronization():
    gen, pos, neg = to_gpu(*feature_sets())
    for t in gen.values():
        t.requires_grad_()
    loss, leaves = dg.DriftingLoss(), list(gen.values())
    wn = torch.rand(4, 3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(loss(gen, pos, neg, negative_weight=wn).loss, leaves)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_launches_do_not_grow_with_features_of_one_width():
    def launches(keys):
        gen, pos = ({f"k{i}": samples(2, n, 3, 8, seed=i).cuda() for i in range(keys)} for n in (4, 5))
        for t in gen.values():
            t.requires_grad_()
        loss, leaves = dg.DriftingLoss(), list(gen.values())
        torch.autograd.grad(loss(gen, pos).loss, leaves)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            torch.autograd.grad(loss(gen, pos).loss, leaves)
            torch.cuda.synchronize()
        return sum("LaunchKernel" in event.name for event in seen.events())

    few, many = launches(4), launches(40)
    assert 0 < few == many


def test_memory_bound():
    n, p, m, width, vectors, chunk = 16, 16, 4, 64, 512, 32
    gen, pos, neg = ({"f": torch.randn(4, k, vectors, width, device="cuda")} for k in (n, p, m))
    loss = dg.DriftingLoss(chunk=chunk)
    loss(gen, pos, neg)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(gen, pos, neg)
    t = n + p + m
    bound = 4 * 2 * chunk * (8 * n * t + 6 * n * width + 5 * t * width)
    assert torch.cuda.max_memory_allocated() - held <= bound + 2**20


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("normalization", ["both", "y", "none"])  # Sinkhorn reads its error on the host
def test_a_captured_loss(normalization, weighted):
    """Each replay of a CUDA graph of the loss and its gradient gives the results of a call, with kernels and
    in plain PyTorch.
    """
    names = {"a": (3, 64), "b": (1, 64), "c": (2, 128)}
    sets = [
        {
            name: torch.randn(4, n, *shape, device="cuda", dtype=torch.bfloat16)
            for name, shape in names.items()
        }
        for n in (16, 24, 8)
    ]
    leaves = [tensor.requires_grad_() for tensor in sets[0].values()]
    weight = torch.rand(4, 24, device="cuda") + 0.5 if weighted else None
    loss = dg.DriftingLoss(normalization=normalization)

    def call():
        out = loss(*sets, positive_weight=weight)
        return out.loss, *torch.autograd.grad(out.loss, leaves)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            for features in sets:
                for tensor in features.values():
                    tensor.normal_()
        scratch = [torch.full((2**20,), 7, device="cuda") for _ in range(4)]  # overwrite freed memory
        graph.replay()
        del scratch
        for got, want in zip(replayed, call(), strict=True):
            # Plain PyTorch adds with atomic operations, in any order.
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-6)
            assert normalization != "both" or torch.equal(got, want)
