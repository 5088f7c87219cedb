"""Choices of the loss kernels by shape: dispatch, tiles, and strips of bounded memory."""

import pytest
import torch

import driftgen as dg
from driftgen.drift.batching import buckets_by_width
from driftgen.drift.fused import plan as plans
from driftgen.drift.fused import strip_plan, tile_sizes
from driftgen.drift.fused.shapes import BucketShape, fits_one_program
from driftgen.drift.fused.strip_plan import plan_strips
from driftgen.drift.fused.tile_sizes import Tile, find_strip_tiles, find_tile
from driftgen.drift.interfaces import LossCall
from driftgen.ops.launch import Launch
from tests.support.interpreter import DEVICE, _kernels_everywhere  # noqa: F401

pytest.importorskip("triton")


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


@pytest.mark.parametrize("temperatures", [1, 3, 4])
@pytest.mark.parametrize("width", [65, 256, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strips_fit_the_registers(width, dtype, temperatures):
    shape = bucket_shape(width, (640, 0, 640), dtype)
    for kernel, drifts in (("products", temperatures), ("gradient", 1)):
        writes, reads = find_strip_tiles(kernel, shape, drifts)
        assert (reads.rows, reads.columns) == (writes.rows, writes.columns)
        assert reads.columns % reads.inner == 0
        assert drifts * reads.rows * reads.outer <= 128 * 32 * reads.warps


def test_drifts_that_do_not_fit_the_registers_are_narrower(monkeypatch):
    tile = Tile(rows=128, outer=128, warps=8)
    monkeypatch.setattr(tile_sizes, "TILES", dict.fromkeys(tile_sizes.TILES, (tile,)))
    shape = bucket_shape(256, (640, 0, 640))
    outers = [find_strip_tiles("products", shape, drifts)[1].outer for drifts in (1, 2, 3, 4)]
    assert outers == [128, 128, 64, 64]


@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("sizes", [(256, 32, 256), (640, 0, 640), (512, 64, 2048), (1024, 96, 4000)], ids=str)
@pytest.mark.parametrize("width", [256, 1024])
def test_scratch_memory_is_bounded(sizes, width, processors, monkeypatch):
    """At most a quarter of inputs and outputs, or a constant, whatever the number of problems."""
    monkeypatch.setattr(strip_plan, "processors", lambda device: processors)
    for groups in (1, 64, 4096):
        shape = BucketShape((0,), (1,), width, groups, sizes, torch.bfloat16)
        outputs = groups * sizes[0] * width * 2
        least = outputs + groups * sum(sizes) * width * 2
        for kernel, drifts, matrices, values in (("products", 3, 3, 6), ("gradient", 1, 2, 1)):
            _, reads = find_strip_tiles(kernel, shape, drifts)
            before = kernel == "products"
            plan = plan_strips(shape, reads, matrices, values, before, torch.device("cpu"))
            scratch = plan.slots * (2 * plan.coefficients + 4 * plan.sums)
            assert 1 <= plan.slots <= plan.strips
            assert scratch <= 40 * 2**20
            assert scratch <= max(0.25 * least + before * outputs, 4 * 2**20)


def test_turns_fill_the_processors():
    # 132 processors take 33 strips of 4 parts at once. 40 strips would take twice as long.
    assert strip_plan._best_slots(512, 40, 4, 43, 132) == 33
    # Short programs: fewer turns outweigh idle processors.
    assert strip_plan._best_slots(80, 40, 4, 4, 132) == 40
    assert strip_plan._best_slots(3, 3, 4, 4, 132) == 3


@pytest.mark.parametrize(
    ("width", "generated", "options", "one"),
    [
        (1024, 256, {}, True),
        (256, 256, {}, False),  # exponentials would take longer than distances
        (1024, 640, {}, False),
        (1024, 256, {"convention": "paper", "normalization": "y"}, False),  # columns have no sums
    ],
    ids=str,
)
def test_wide_vectors_have_one_softmax_sweep(width, generated, options, one):
    gen, neg, pos = (
        torch.zeros(1, n, 1, width, dtype=torch.bfloat16, device=DEVICE) for n in (generated, 32, 256)
    )
    settings = dg.DriftingLoss(**options).settings
    plan = plans.make_plan(LossCall(settings, one_bucket(gen, pos, neg), None, None, True))
    products = plan.widths[0].products
    assert (products.column_terms is not None) is one
    tile = find_tile("softmax", bucket_shape(width, (generated, 32, 256)))
    rows_of_others = 0 if one or options else sum(-(-count // tile.rows) for count in (32, 256))
    assert products.softmax.programs == -(-generated // tile.rows) + rows_of_others


@pytest.mark.parametrize(("negatives", "size"), [(5, 16), (32, 32), (100, 64)])
def test_few_negatives_have_small_tiles(negatives, size):
    gen, neg, pos = (
        torch.zeros(1, n, 1, 1024, dtype=torch.bfloat16, device=DEVICE) for n in (256, negatives, 256)
    )
    plan = plans.make_plan(LossCall(dg.DriftingLoss().settings, one_bucket(gen, pos, neg), None, None, True))
    for strips in (plan.widths[0].products.last, plan.widths[0].gradients[0].strips):
        assert strips.reads.options["BK_NEG"] == size
        assert strips.reads.options["BK"] == 64
