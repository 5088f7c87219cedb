"""Kernels of the loss for large groups against float64, with tiles so small that few samples need several."""

import math

import numpy as np
import pytest
import torch

import driftgen as dg
from driftgen.drift.batching import buckets_by_width
from driftgen.drift.fused import plan as plans
from driftgen.drift.fused import shapes, tile_sizes, tiled_plan
from driftgen.drift.fused.shapes import BucketShape, fits_one_program
from driftgen.drift.fused.tile_sizes import Tile, find_tile
from driftgen.drift.interfaces import LossCall, Statistics
from driftgen.ops import dispatch
from driftgen.ops.launch import Launch
from tests.support import twin
from tests.support.accuracy import error
from tests.support.interpreter import (  # noqa: F401
    DEVICE,
    _bfloat16_on_the_cpu,
    _kernels_at_all_temperatures,
    _kernels_everywhere,
)
from tests.support.kernel_losses import KINDS, compare, features, run, samples

pytest.importorskip("triton")
SIZES = 18, 5, 17  # generated, negatives, positives: two tiles, one, and two, all of them ragged


@pytest.fixture
def tiles(monkeypatch):
    """Cut all problems into tiles of 16 samples. Returns a function that sets other tiles."""
    monkeypatch.setattr(shapes, "MAX_GENERATED", 0)
    monkeypatch.setattr(tiled_plan, "CENTER_TILE", 16)

    def use(**sizes):
        tile = Tile(**{"rows": 16, "columns": 16, "inner": 32, "outer": 32} | sizes)
        for table in ("TILES", "DIRECT"):
            monkeypatch.setattr(tile_sizes, table, dict.fromkeys(tile_sizes.TILES, (tile,)))

    use()
    return use


@pytest.fixture
def launched(monkeypatch):
    """Record the names of all kernels that are launched, except statistics."""
    names, real = [], Launch.__call__

    def call(self, *tensors):
        if "statistics" not in self.kernel.__name__:
            names.append(self.kernel.__name__)
        real(self, *tensors)

    monkeypatch.setattr(Launch, "__call__", call)
    return names


def kernel_names(direct, defer):
    return [
        *(["center_kernel", "norms_kernel"] if not direct else []),
        *("tiled_scale_kernel", "softmax_kernel"),
        *(["affinity_kernel"] if not defer else []),
        *("tiled_products_kernel", "tiled_gradient_kernel"),
    ]


def test_several_tiles(tiles, launched):
    tiles(inner=64, outer=64)
    gen, neg, pos = samples("random", (17, 2, 3), 34, groups=1, dtype=torch.bfloat16)
    compare(gen, pos, neg, twin.release_loss, temperatures=(0.05, 0.2))
    assert launched == kernel_names(direct=False, defer=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_release(kind, dtype, tiles, launched):
    gen, neg, pos = samples(kind, SIZES, 34, groups=2 if kind == "random" else 1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert launched == kernel_names(dtype == torch.float32, defer=False)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["random", "offset"])
def test_deferred_sums(kind, dtype, tiles, launched):
    tiles(defer=True)
    gen, neg, pos = samples(kind, SIZES, 34, groups=1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)
    assert launched == kernel_names(dtype == torch.float32, defer=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 33, 70])
def test_widths(width, dtype, tiles):
    gen, neg, pos = samples("random", SIZES, width, groups=1, dtype=dtype)
    compare(gen, pos, neg, twin.release_loss)


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((16, 0, 16), (16, 16)),
        ((17, 16, 33), (16, 32)),
        ((33, 1, 15), (32, 16)),
        ((32, 3, 1), (16, 32)),
        ((2, 3, 20), (16, 16)),
    ],
    ids=str,
)
def test_borders_of_tiles(sizes, shape, convention, tiles):
    """A sample is masked as its own neighbor wherever rows and columns of tiles end."""
    tiles(rows=shape[0], columns=shape[1])
    gen, neg, pos = samples("random", sizes, 8, groups=1)
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg if sizes[1] else None, exact, temperatures=(0.1, 0.3), convention=convention)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "normalization", "defer"),
    [
        ("laplace", "both", True),
        ("laplace", "y", True),
        ("gaussian", "both", False),
        ("gaussian", "y", False),
        ("inverse_multiquadric", "both", True),
        ("inverse_multiquadric", "y", False),
    ],
)
def test_paper(kernel, normalization, defer, tiles):
    tiles(defer=defer)
    gen, neg, pos = samples("random", SIZES, 10, groups=1)
    rng = np.random.default_rng(1)
    compare(
        gen, pos, neg,
        lambda *a: twin.paper_loss(*a, kernel=kernel, normalization=normalization),
        [rng.uniform(0.2, 2, (1, n)) for n in SIZES],
        convention="paper", kernel=kernel, normalization=normalization, temperatures=(0.1, 0.3),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
@pytest.mark.parametrize("defer", [False, True])
def test_weights_may_be_zero(convention, defer, tiles):
    """Whole tiles have no weight, the first of them and the nearest ones among them."""
    tiles(defer=defer)
    gen, _, pos = samples("random", (18, 0, 34), 10)
    neg = gen[:, :17] + 1e-3
    weights = [np.ones((2, 18)), np.zeros((2, 17)), np.ones((2, 34))]
    weights[0][:, :16] = 0
    weights[2][1, :32] = 0
    exact = {"release": twin.release_loss, "paper": twin.paper_loss}[convention]
    compare(gen, pos, neg, exact, weights, convention=convention, temperatures=(0.05, 0.2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"convention": "paper", "attraction": 1.5, "normalize_drift": False}], ids=str
)
def test_whole_problems_and_tiles_agree(options, tiles, monkeypatch):
    """Several features and widths, several vectors, and gradients of single groups."""
    pos, neg = features(1, 4, torch.float32), features(2, 2, torch.float32)
    weight, results = torch.tensor([0.0, 2.5]), []
    for most in (0, 64):
        monkeypatch.setattr(shapes, "MAX_GENERATED", most)
        gen = features(0, 17, torch.float32, requires=True)
        out = dg.DriftingLoss(**options)(gen, pos, neg, negative_weight=weight)
        (out.loss + 0.3 * out.per_group[1]).backward()
        results.append([out.loss, out.per_group, *out.scale.values(), *out.drift.values()])
        results[-1] += [tensor.grad for tensor in gen.values()]
    for tiled, whole in zip(*results, strict=True):
        assert error(tiled, whole) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_the_same_to_the_bit_and_nothing_is_left_unwritten(dtype, tiles, monkeypatch):
    """Fill all allocated memory with NaN first."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, real=real, **k: real(*a, **k).fill_(math.nan))
    gen, neg, pos = (t[:, :, None].to(DEVICE) for t in samples("random", (17, 2, 4), 34, 1, dtype))
    runs = []
    for _ in range(2):
        leaf = gen.clone().requires_grad_()
        out = dg.DriftingLoss((0.05, 0.2))({"": leaf}, {"": pos}, {"": neg})
        out.loss.backward()
        runs.append([out.loss.detach(), out.per_group.detach(), *out.drift.values(), leaf.grad])
    for first, second in zip(*runs, strict=True):
        assert first.isfinite().all()
        assert torch.equal(first, second)


@pytest.mark.slow
def test_engines_all_reduce_the_same_sums(tiles, monkeypatch):
    reduced = []
    monkeypatch.setattr(LossCall, "all_reduce", lambda call, sums: reduced.append(sums.clone()))
    gen, neg, pos = (t.to(DEVICE) for t in samples("random", SIZES, 6))
    results = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        loss = dg.DriftingLoss((0.1, 0.5), process_group=object())
        out, gradient = run(loss, gen, pos, neg, negative_weight=torch.tensor([0.5, 2.0]))
        results.append([out.loss, out.per_group, out.scale, out.drift, gradient])
    for left, right in (results, (reduced[:2], reduced[2:])):
        for a, b in zip(left, right, strict=True):
            assert error(a, b) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("convention", ["release", "paper"])
def test_a_single_generated_sample(convention, tiles, monkeypatch):
    """Its column of A is empty without the release's constants."""
    gen, neg, pos = samples("random", (1, 3, 20), 6)
    results = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        out, gradient = run(dg.DriftingLoss(convention=convention), gen, pos, neg)
        results.append([out.loss, out.per_group, out.drift, gradient])
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.slow
def test_given_statistics(tiles, monkeypatch):
    gen, neg, pos = samples("random", SIZES, 6)
    given = Statistics(torch.full((1,), 3.0, device=DEVICE), torch.full((1, 3), 0.2, device=DEVICE), 8)
    results = []
    for places in ({"cpu", "cuda"}, set()):
        monkeypatch.setattr(dispatch, "DEVICES", places)
        out, gradient = run(dg.DriftingLoss(), gen, pos, neg, statistics=given)
        results.append([out.loss, out.per_group, out.drift, gradient])
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-5


@pytest.mark.slow
def test_no_gradient_is_needed(tiles, launched):
    gen, neg, pos = (t.to(DEVICE) for t in samples("random", SIZES, 6))
    out = dg.DriftingLoss()(gen, pos, neg)
    assert out.loss.isfinite()
    assert "tiled_gradient_kernel" not in launched


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(65, 30, 100), (8, 0, 129)], ids=str)
def test_tiles_of_the_table(sizes, launched):
    """Groups that do not fit one program are cut into tiles."""
    gen, neg, pos = samples("random", sizes, 3, groups=1)
    compare(gen, pos, neg if sizes[1] else None, twin.release_loss, temperatures=(0.05, 0.2))
    assert launched == kernel_names(direct=True, defer=True)


def bucket_shape(width, sizes, dtype=torch.bfloat16):
    return BucketShape((0,), (1,), width, 1, sizes, dtype)


@pytest.mark.parametrize(
    ("sizes", "whole"),
    [
        ((64, 16, 64), True),
        ((64, 32, 128), True),
        ((64, 33, 128), False),
        ((65, 16, 64), False),
        ((8, 0, 129), False),
        ((8, 129, 4), False),
        ((256, 32, 256), False),
        ((640, 0, 640), False),
    ],
)
def test_dispatch(sizes, whole):
    assert fits_one_program(bucket_shape(64, sizes)) is whole
    gen, neg, pos = (torch.zeros(1, n, 1, 40, dtype=torch.bfloat16, device=DEVICE) for n in sizes)
    buckets = one_bucket(gen, pos, neg if sizes[1] else None)
    plan = plans.make_plan(LossCall(dg.DriftingLoss().settings, buckets, None, None, True))
    assert isinstance(plan.widths[0].scale, Launch) is whole
    assert plan.widths[0].gradients[0].kernel.__name__ == ("" if whole else "tiled_") + "gradient_kernel"


def one_bucket(gen, pos, neg):
    return buckets_by_width({"": gen}, {"": pos}, None if neg is None else {"": neg})


def test_the_last_row_that_applies_is_used(monkeypatch):
    rows = Tile(rows=16), Tile(rows=32, from_width=64), Tile(rows=64, from_width=64, from_generated=256)
    monkeypatch.setattr(tile_sizes, "TILES", {"scale": rows})
    for width, generated, expected in ((63, 256, 16), (64, 255, 32), (64, 256, 64), (1024, 1024, 64)):
        assert find_tile("scale", bucket_shape(width, (generated, 0, 64))).rows == expected
    narrow = find_tile("scale", bucket_shape(40, (20, 0, 64)))
    assert (narrow.inner, narrow.outer) == (64, 64)
    narrow = find_tile("scale", bucket_shape(33, (20, 0, 64)))
    assert narrow.inner == 64


@pytest.mark.parametrize("width", [1, 33, 64, 128, 256, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_shape_has_tiles(width, dtype):
    shape = bucket_shape(width, (640, 0, 640), dtype)
    for kernel in tile_sizes.DIRECT if shape.direct else tile_sizes.TILES:
        tile = find_tile(kernel, shape)
        for size in (tile.rows, tile.columns, tile.inner, tile.outer):
            assert size >= 16
            assert size & (size - 1) == 0
